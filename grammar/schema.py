"""The front end for JSON Schema: what a schema means, keyword by keyword, before any grammar is built. Knows no
tokenizer and no mask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema_rs

from specdec.errors import InvalidRequest
from specdec.grammar.refusal import refusal

Formats = Literal["assert", "annotate"]
Verdict = Literal["enforced", "rewritten", "annotation", "refused"]


@dataclass(frozen=True, slots=True)
class Keyword:
    """What became of one keyword. `pointer` is the JSON pointer of the keyword itself, as in `/properties/a/pattern`."""

    pointer: str
    keyword: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSchema:
    """A schema ready for the backend. `text` is what the backend compiles; `validator` decides by the original."""

    text: str
    keywords: tuple[Keyword, ...]
    draft: str
    validator: Any


DRAFTS: dict[str, type] = {
    "http://json-schema.org/draft-04/schema": jsonschema_rs.Draft4Validator,
    "http://json-schema.org/draft-06/schema": jsonschema_rs.Draft6Validator,
    "http://json-schema.org/draft-07/schema": jsonschema_rs.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema_rs.Draft202012Validator,
}


def prepare(
    schema_text: str, *, formats: Formats = "assert", remotes: Mapping[str, object] | None = None
) -> PreparedSchema:
    """Read a schema, JSON text of an object or a boolean. Raises `InvalidRequest` for `schema`."""
    schema = json.loads(schema_text)
    draft = _draft(schema)
    try:
        registry = jsonschema_rs.Registry(list((remotes or {}).items()), retriever=_refuse_to_fetch)
        validator = DRAFTS[draft](
            schema, validate_formats=formats == "assert", ignore_unknown_formats=True, registry=registry, offline=True
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise refusal("schema", str(error), "invalid_schema") from error
    return PreparedSchema(schema_text, (), draft, validator)


def _draft(schema: object) -> str:
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(named, str) and named.rstrip("#") in DRAFTS:
        return named.rstrip("#")
    if named is not None:
        raise InvalidRequest("schema", f"/$schema: {named!r} is no draft from 4 to 2020-12", code="unsupported_schema")
    return "https://json-schema.org/draft/2020-12/schema"


def _refuse_to_fetch(uri: str) -> object:
    raise ValueError(f"{uri} is not among the documents at hand, and nothing is fetched")
