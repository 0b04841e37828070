"""The front end for JSON Schema: from a schema to a grammar that means the same, with a verdict on every keyword. What
the grammar cannot say is refused. Knows no tokenizer and no mask.
"""

from __future__ import annotations

import decimal
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import jsonschema_rs

from specdec.errors import InvalidRequest
from specdec.grammar import lark
from specdec.grammar.lowering import Lowering, ReferenceLoop, TooManyShapes, Verdict
from specdec.grammar.references import DRAFTS, URIS, Documents, UnknownDraft, Unresolvable
from specdec.grammar.refusal import refusal
from specdec.grammar.residue import RELATING_KEYS, VALIDATORS, TooManyRules, residue
from specdec.grammar.rules import Rule
from specdec.grammar.shapes import Is, Residue
from specdec.grammar.spelling import PLAIN, Spelling

Formats = Literal["assert", "annotate"]
PropertyOrder = Literal["schema", "any"]
MAX_POINTERS = 3  # that a message names
PRECISION = 1_000  # decimal digits: more than any bound that is taken

_OLD_KEYWORDS = ("additionalItems", "dependencies")
NO_REMOTES: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Keyword:
    """What became of one keyword. `pointer` leads to the keyword itself, as in `/properties/a/pattern`."""

    pointer: str
    keyword: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSchema:
    """A schema ready for the backend: `text` is its grammar in llguidance's Lark notation, without the terminals of
    `lark.structure`; `freedom` is what it leaves to texts, and `residue` what it leaves out otherwise.
    `draft` is the URI of the schema's draft, and `validator` judges whole values by the schema as it came."""

    text: str
    freedom: lark.Freedom
    residue: Rule | None
    keywords: tuple[Keyword, ...]
    draft: str
    validator: Any

    def pointers(self, keywords: Collection[str] = (), verdict: str = "") -> str:
        """Where it has some keywords, or any with a verdict: up to three pointers behind a colon, or nothing."""
        found = [k.pointer for k in self.keywords if k.keyword in keywords or k.verdict == verdict]
        return ": " + ", ".join([*found[:MAX_POINTERS], *(["..."] if found[MAX_POINTERS:] else [])]) if found else ""


@dataclass(frozen=True, slots=True)
class SchemaReport:
    """Whether a schema compiles, the reason where it does not, and what became of each keyword that was looked at."""

    compiled: bool
    code: str
    reason: str
    keywords: tuple[Keyword, ...]


class SchemaRefused(InvalidRequest):
    """A schema that cannot be enforced, with what is known of its keywords."""

    def __init__(self, error: InvalidRequest, keywords: tuple[Keyword, ...]) -> None:
        super().__init__(error.param, error.message, code=error.code)
        self.keywords = keywords


def prepare(
    schema_text: str,
    *,
    formats: Formats = "assert",
    remotes: Mapping[str, object] = NO_REMOTES,
    spelling: Spelling = PLAIN,
    property_order: PropertyOrder = "schema",
) -> PreparedSchema:
    """The grammar of a schema (JSON text of an object or a boolean). `remotes` are the documents that it may refer to,
    by URI; nothing is fetched. Formats are enforced, or ignored where they are to "annotate". `spelling` says which
    characters are written as escapes. With keys in "any" order, the grammar says which there may be and what they hold,
    and what relates them to each other is checked.

    Raises `InvalidRequest` for `schema`, with the pointers of all keywords that are refused; its code is
    "invalid_schema", "unsupported_schema", "unsatisfiable" or "too_large".
    """
    schema = _read(schema_text)
    draft = _draft(schema)
    validator = _validator(schema, draft, formats, remotes)
    tracks = any("unevaluated" in json.dumps(document) for document in (_read(schema_text, float), *remotes.values()))
    lowering: Lowering | None = None
    try:
        with decimal.localcontext(prec=PRECISION):
            documents = Documents(schema, draft, remotes)
            lowering = Lowering(
                documents, assert_formats=formats == "assert", tracks_evaluated=tracks, spelling=spelling
            )
            root = Is(documents.root)
            written = lark.write(lowering, frozenset({(root, True)}), any_order=property_order == "any")
            unsaid = {refusal.pointer for refusal in written.unsaid}
            rule = residue(
                documents, root, unsaid, assert_formats=formats == "assert", any_order=property_order == "any"
            )
    except (Unresolvable, ReferenceLoop) as error:
        raise _refused(str(error), "invalid_schema", lowering) from error
    except UnknownDraft as error:
        raise _refused(str(error), "unsupported_schema", lowering) from error
    except lark.Unsatisfiable as error:
        raise _refused("no value satisfies it", "unsatisfiable", lowering) from error
    except (lark.TooLarge, TooManyRules, TooManyShapes, RecursionError) as error:
        message = str(error) or "its alternatives multiply beyond the budget"
        message = "its references nest too deep" if isinstance(error, RecursionError) else message
        raise _refused(message, "too_large", lowering) from error
    except lark.Refused as error:
        raise _refused(str(error), "unsupported_schema", lowering, frozenset(error.refusals)) from error
    keywords = _keywords(lowering, written.unsaid, property_order)
    return PreparedSchema(written.text, written.freedom, rule, keywords, URIS[draft], validator)


def reprepare(
    schema_text: str,
    text: str,
    freedom: lark.Freedom,
    keywords: tuple[Keyword, ...],
    *,
    formats: Formats = "assert",
    remotes: Mapping[str, object] = NO_REMOTES,
    property_order: PropertyOrder = "schema",
) -> PreparedSchema:
    """What `prepare` made of the same schema in another process, from the parts of it that are plain data; the rest is
    made anew."""
    schema = _read(schema_text)
    draft = _draft(schema)
    unsaid = {keyword.pointer for keyword in keywords if keyword.verdict == "checked"}
    with decimal.localcontext(prec=PRECISION):
        documents = Documents(schema, draft, remotes)
        rule = residue(
            documents,
            Is(documents.root),
            unsaid,
            assert_formats=formats == "assert",
            any_order=property_order == "any",
        )
    validator = _validator(schema, draft, formats, remotes)
    return PreparedSchema(text, freedom, rule, keywords, URIS[draft], validator)


def check_schema(
    schema_text: str,
    *,
    formats: Formats = "assert",
    remotes: Mapping[str, object] = NO_REMOTES,
    property_order: PropertyOrder = "schema",
) -> SchemaReport:
    """What becomes of a schema, without an error for one that is refused. Raises `InvalidRequest` for text that is no
    schema."""
    try:
        prepared = prepare(schema_text, formats=formats, remotes=remotes, property_order=property_order)
    except SchemaRefused as error:
        return SchemaReport(False, error.code, error.message, error.keywords)
    return SchemaReport(True, "", "", prepared.keywords)


def _read(text: str, numbers: Any = decimal.Decimal) -> Any:
    try:
        return json.loads(text, parse_float=numbers, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidRequest("schema", f"must be JSON: {error}", code="invalid_schema") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _draft(schema: Any) -> int:
    """The draft that a schema names; else draft 7 where it uses what later drafts do not have, else 2020-12."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(named, str) and named.rstrip("#") in DRAFTS:
        return DRAFTS[named.rstrip("#")]
    if isinstance(named, str):
        raise refusal("schema", f"/$schema: {named!r} is no draft from 4 to 2020-12", "unsupported_schema")
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("items"), list) or any(keyword in value for keyword in _OLD_KEYWORDS):
                return 7
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return 2020


def _validator(schema: Any, draft: int, formats: Formats, remotes: Mapping[str, object]) -> Any:
    """The validator of the schema as it came. Raises `InvalidRequest` where it is no schema of its draft."""
    try:
        documents: list[tuple[str, Any]] = list(remotes.items())
        registry = jsonschema_rs.Registry(documents, retriever=_refuse_to_fetch)
        return VALIDATORS[draft](
            schema, validate_formats=formats == "assert", ignore_unknown_formats=True, registry=registry, offline=True
        )
    except jsonschema_rs.ValidationError as error:
        missing = re.match("Resource '(.*?)' is not present in a registry", error.message)
        if missing is not None:
            message = f"$ref: {missing[1]} is not among the documents at hand, and nothing is fetched"
            raise refusal("schema", message, "unsupported_schema") from error
        pointer = "".join(f"/{token}" for token in error.instance_path)
        raise refusal("schema", f"{pointer + ': ' if pointer else ''}{error.message}", "invalid_schema") from error
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise refusal("schema", str(error), "invalid_schema") from error


def _refuse_to_fetch(uri: str) -> Any:
    raise ValueError(f"{uri} is not among the documents at hand, and nothing is fetched")


def _keywords(
    lowering: Lowering | None, unsaid: Residue = frozenset(), property_order: PropertyOrder = "schema"
) -> tuple[Keyword, ...]:
    found = {} if lowering is None else dict(lowering.verdicts)
    if property_order == "any":
        for pointer, (keyword, verdict, _) in found.items():
            if keyword in RELATING_KEYS and verdict in ("enforced", "rewritten"):
                found[pointer] = (keyword, "checked", "keys come in any order")
    for item in unsaid:
        found[item.pointer] = (item.keyword, "refused" if item.final else "checked", item.reason)
    return tuple(Keyword(pointer, *rest) for pointer, rest in sorted(found.items()))


def _refused(message: str, code: str, lowering: Lowering | None, unsaid: Residue = frozenset()) -> SchemaRefused:
    return SchemaRefused(refusal("schema", message, code), _keywords(lowering, unsaid))
