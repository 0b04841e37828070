"""Where the parts of a schema are and where its references lead. Knows which keywords hold schemas, and no more of what
they mean. Nothing is fetched: documents are given, or the metaschemas that jsonschema-rs carries.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin

import jsonschema_rs

DRAFTS: dict[str, int] = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
URIS: dict[int, str] = {number: uri for uri, number in DRAFTS.items()}
MAX_PLACES = 20_000

_ONE = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "additionalProperties",
    "additionalItems",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
    "items",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")


class Unresolvable(Exception):
    """A reference leads nowhere."""


class UnknownDraft(Exception):
    """A document is written in a draft, or with a vocabulary of its own, that is not known here."""


@dataclass(frozen=True, slots=True)
class Place:
    """A schema: the document it is in, and its JSON pointer there (""): the root)."""

    document: str
    pointer: str

    def __str__(self) -> str:
        return f"{self.document}#{self.pointer}" if self.document else self.pointer


@dataclass(frozen=True, slots=True)
class _Spot:
    """What is known of a place: its value, and the URI of the resource it belongs to."""

    value: Any
    resource: str


class Documents:
    """A schema and the documents it may refer to. `remotes` by their URIs."""

    def __init__(self, schema: object, draft: int, remotes: Mapping[str, object]) -> None:
        self._remotes = {uri.rstrip("#"): document for uri, document in remotes.items()}
        self._spots: dict[Place, _Spot] = {}
        self._resources: dict[str, Place] = {}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._dynamic: set[tuple[str, str]] = set()
        self._drafts: dict[str, int] = {"": draft}
        self._recursive: set[str] = set()
        self.root = Place("", "")
        self._resources[""] = self.root
        self._index(schema, self.root, "", draft)

    def schema(self, place: Place) -> Any:
        """The value at a place."""
        return self._spots[place].value

    def draft(self, place: Place) -> int:
        """The draft that a place is written in: 4, 6, 7, 2019 or 2020."""
        return self._drafts[place.document]

    def resource(self, place: Place) -> str:
        """The URI of the schema resource that a place belongs to."""
        return self._spots[place].resource

    def child(self, place: Place, *tokens: str | int) -> Place:
        """The place below a place."""
        pointer = place.pointer + "".join("/" + _escape(str(token)) for token in tokens)
        return Place(place.document, pointer)

    def uses(self, keyword: str) -> bool:
        """Whether any schema indexed so far has a keyword."""
        return any(isinstance(spot.value, dict) and keyword in spot.value for spot in self._spots.values())

    def resolve(self, place: Place, reference: str) -> Place:
        """Where a reference at `place` leads. Raises `Unresolvable`."""
        uri = _join(self.resource(place), reference)
        address, _, fragment = uri.partition("#")
        fragment = unquote(fragment)
        target = self._resource(address, self.draft(place))
        if target is None:
            raise Unresolvable(f"{reference!r} leads to no document at hand, and nothing is fetched")
        if not fragment:
            return target
        if fragment.startswith("/"):
            return self._point(target, fragment, reference)
        anchor = self._anchors.get((self._spots[target].resource, fragment))
        if anchor is None:
            raise Unresolvable(f"{reference!r}: there is no anchor {fragment!r}")
        return anchor

    def dynamic_anchor(self, resource: str, name: str) -> Place | None:
        """The place in a resource that a `$dynamicAnchor` names."""
        return self._anchors.get((resource, name)) if (resource, name) in self._dynamic else None

    def dynamic_names(self, resource: str) -> frozenset[str]:
        """What a dynamic reference may find in a resource: the names of its anchors, "" for `$recursiveAnchor`."""
        names = frozenset(name for uri, name in self._dynamic if uri == resource)
        return names | {""} if resource in self._recursive else names

    def is_recursive(self, resource: str) -> bool:
        """Whether a resource's root has `$recursiveAnchor: true`."""
        return resource in self._recursive

    def root_of(self, resource: str) -> Place:
        """The root of a resource."""
        return self._resources[resource]

    def _resource(self, address: str, draft: int) -> Place | None:
        if address in self._resources:
            return self._resources[address]
        document = self._remotes.get(address)
        if document is None and address in self._remotes:
            return None
        if document is None:
            document = _metaschemas().get(address)
        if document is None:
            return None
        place = Place(address, "")
        self._drafts[address] = _declared(document, draft)
        self._resources[address] = place
        self._index(document, place, address, self._drafts[address])
        return place

    def _point(self, start: Place, pointer: str, reference: str) -> Place:
        """The place that a pointer leads to from the root of a resource."""
        place, value = start, self.schema(start)
        for token in pointer.split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and token in value:
                value = value[token]
            elif isinstance(value, list) and re.fullmatch("0|[1-9][0-9]*", token) and int(token) < len(value):
                value = value[int(token)]
            else:
                raise Unresolvable(f"{reference!r} leads nowhere: there is no {token!r}")
            parent, place = place, self.child(place, token)
            if place not in self._spots:
                self._spots[place] = _Spot(value, self.resource(parent))
        if not isinstance(value, dict | bool):
            raise Unresolvable(f"{reference!r} leads to what is no schema")
        self._index(value, place, self.resource(place), self.draft(place))
        return place

    def _index(self, schema: Any, start: Place, resource: str, draft: int) -> None:
        """Note every schema from a place on, with the names that lead to it."""
        pending = [(schema, start, resource)]
        while pending:
            value, place, resource = pending.pop()
            if not isinstance(value, dict | bool):
                continue
            if isinstance(value, dict):
                resource = self._name(value, place, resource, draft)
            self._spots[place] = _Spot(value, resource)
            if len(self._spots) > MAX_PLACES:
                raise Unresolvable(f"the documents hold more than {MAX_PLACES} schemas")
            if isinstance(value, dict) and not (draft <= 7 and "$ref" in value and place.pointer):
                pending.extend((item, self.child(place, *tokens), resource) for tokens, item in _subschemas(value))
            elif isinstance(value, dict):
                for keyword in ("definitions", "$defs"):
                    if isinstance(value.get(keyword), dict):
                        for name, item in value[keyword].items():
                            pending.append((item, self.child(place, keyword, name), resource))

    def _name(self, value: dict[str, Any], place: Place, resource: str, draft: int) -> str:
        """The resource that a schema belongs to, once its own names are noted."""
        if draft <= 7 and "$ref" in value:
            return resource
        own = value.get("id" if draft == 4 else "$id")
        if isinstance(own, str):
            if draft <= 7 and own.startswith("#"):
                self._anchors[(resource, own[1:])] = place
            else:
                resource = _join(resource, own).partition("#")[0]
                self._resources.setdefault(resource, place)
                named = own.partition("#")[2]
                if draft <= 7 and named:
                    self._anchors[(resource, named)] = place
        if draft >= 2019 and isinstance(value.get("$anchor"), str):
            self._anchors[(resource, value["$anchor"])] = place
        if draft >= 2020 and isinstance(value.get("$dynamicAnchor"), str):
            self._anchors[(resource, value["$dynamicAnchor"])] = place
            self._dynamic.add((resource, value["$dynamicAnchor"]))
        if draft == 2019 and value.get("$recursiveAnchor") is True:
            self._recursive.add(resource)
        return resource


@functools.cache
def _metaschemas() -> dict[str, Any]:
    """The metaschemas of all drafts, and the vocabularies they refer to, by URI, as jsonschema-rs carries them."""
    found: dict[str, Any] = {}
    for uri in DRAFTS:
        bundle: Any = jsonschema_rs.bundle({"$schema": uri, "allOf": [{"$ref": uri}]})
        found |= bundle.get("$defs") or bundle["definitions"]
    return found


def _subschemas(value: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for keyword in _ONE:
        if keyword in value:
            yield (keyword,), value[keyword]
    for keyword in _LISTS:
        if isinstance(value.get(keyword), list):
            for index, item in enumerate(value[keyword]):
                yield (keyword, index), item
    for keyword in _MAPS:
        if isinstance(value.get(keyword), dict):
            for name, item in value[keyword].items():
                yield (keyword, name), item


def _declared(document: object, otherwise: int) -> int:
    """The draft that a document names, or the one of who refers to it."""
    named = document.get("$schema") if isinstance(document, dict) else None
    if not isinstance(named, str):
        return otherwise
    if named.rstrip("#") not in DRAFTS:
        raise UnknownDraft(f"{named!r} is no draft from 4 to 2020-12")
    return DRAFTS[named.rstrip("#")]


def _escape(token: str) -> str:
    return token.replace("~", "~0").replace("/", "~1")


def _join(start: str, reference: str) -> str:
    """RFC 3986, section 5, also for schemes that the standard library doesn't know."""
    if _ABSOLUTE.match(reference):
        return reference
    if reference.startswith("#") or not reference:
        return start.partition("#")[0] + reference
    scheme, colon, rest = start.partition(":")
    if colon and rest[:2] == "//" and _ABSOLUTE.match(start):
        return scheme + urljoin("http:" + rest, reference)[len("http") :]
    return urljoin(start, reference)
