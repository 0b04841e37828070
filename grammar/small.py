"""Which specs are so small that compiling them is quick and harmless whatever they say. Knows no backend."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, Spec, StructuralTag

MAX_BYTES = 16_000
MAX_PROPERTIES = 200
MAX_DEPTH = 32
MAX_REFERENCES = 40
MAX_ENUM = 500
MAX_OPTIONS = 40  # of all anyOf
MAX_COMBINED = 4  # keywords whose parts multiply
MAX_PATTERN = 256
MAX_WRITTEN_OUT = 2_000
MAX_LENGTH = 100  # of strings that must not match something
MAX_LARK_BYTES = 2_000
MAX_LARK_RULES = 40

_COMBINE = {"allOf", "oneOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies", "contains"}
_COMBINE |= {"propertyNames", "minProperties", "maxProperties", "uniqueItems", "multipleOf"}
_COMBINE |= {"unevaluatedProperties", "unevaluatedItems"}
_NEGATE = {"not", "oneOf", "if"}
# An escape, a class, a count, or any other character.
_PARTS = re.compile(r"\\.|\[(?:[^\]\\]|\\.)*+\]|\{(?P<least>\d{1,9})(?:,(?P<most>\d{0,9}))?\}|.", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/((?:[^/\\\n]|\\.)++)/|//[^\n]*')


def is_small(spec: Spec) -> bool:
    """Whether a spec can be compiled where it stands: within some 0.1 seconds of CPU and little memory."""
    match spec:
        case JsonObject():
            return True
        case JsonSchema() | StructuralTag():
            return len(spec.text) <= MAX_BYTES and _is_small_json(json.loads(spec.text))
        case Regex():
            return is_plain(spec.pattern)
        case Choice():
            return sum(map(len, spec.options)) <= MAX_BYTES
        case Lark():
            return _is_small_lark(spec.text)
        case Ebnf():
            return False


def is_plain(pattern: str) -> bool:
    """Whether a regular expression is short, also with its counted repeats written out."""
    if len(pattern) > MAX_PATTERN:
        return False
    sizes, last = [0], 0  # of each group that is open, and of what a count would repeat
    for match in _PARTS.finditer(pattern):
        part = match[0]
        if part == "(":
            sizes.append(0)
        elif part == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif match["least"] is not None:
            sizes[-1] += last * max(int(match["most"] or match["least"]) - 1, 0)
        else:
            last = 1
            sizes[-1] += last
    return sum(sizes) <= MAX_WRITTEN_OUT


def _is_small_json(schema: Any) -> bool:
    counts = dict.fromkeys(("properties", "$ref", "enum", "anyOf", "combined"), 0)
    longest, negates = 0, False
    pending = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            return False
        if isinstance(value, list):
            pending.extend((item, depth + 1) for item in value)
        if not isinstance(value, Mapping):
            continue
        pending.extend((item, depth + 1) for item in value.values())
        for keyword in ("pattern", "format"):
            if isinstance(text := value.get(keyword), str) and not is_plain(text):
                return False
        for keyword in ("minLength", "maxLength"):
            if isinstance(bound := value.get(keyword), int | float):
                longest = max(longest, int(min(bound, MAX_WRITTEN_OUT)))
        negates = negates or bool(_NEGATE & value.keys()) or "(?" in str(value.get("pattern"))
        if longest > MAX_LENGTH and negates:
            return False
        if "patternProperties" in value or value.get("format") == "regex":
            return False
        counts["$ref"] += "$ref" in value or "$dynamicRef" in value
        counts["combined"] += len(_COMBINE & value.keys())
        for keyword in ("properties", "enum", "anyOf"):
            if isinstance(parts := value.get(keyword), Mapping | list):
                counts[keyword] += len(parts)
    most = {"properties": MAX_PROPERTIES, "$ref": MAX_REFERENCES, "enum": MAX_ENUM, "anyOf": MAX_OPTIONS}
    return all(counts[name] <= limit for name, limit in (most | {"combined": MAX_COMBINED}).items())


def _is_small_lark(text: str) -> bool:
    if len(text) > MAX_LARK_BYTES or "%" in text:
        return False
    if not all(is_plain(match[1]) for match in _QUOTED.finditer(text) if match[1]):
        return False
    bare = _QUOTED.sub("a", text)
    return bare.count(":") <= MAX_LARK_RULES and not set("&~{") & set(bare)
