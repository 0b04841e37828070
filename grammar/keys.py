"""A watcher of JSON text that lets no key come twice in one object. Knows no schema."""

from __future__ import annotations

from specdec.grammar.json_text import Kind, Scalar

_NO_KEYS: frozenset[str] = frozenset()


class Keys:
    """The keys so far of the innermost container (none of an array), and those of the containers around it."""

    __slots__ = ("outer", "seen")

    def __init__(self, outer: Keys | None = None, seen: frozenset[str] = _NO_KEYS) -> None:
        self.outer = outer
        self.seen = seen

    def begins(self, kind: Kind) -> Keys:
        """See `Watcher.begins`."""
        return Keys(self) if kind is Kind.OBJECT or kind is Kind.ARRAY else self

    def key(self, name: str) -> Keys | None:
        """See `Watcher.key`."""
        return None if name in self.seen else Keys(self.outer, self.seen | {name})

    def scalar(self, value: Scalar) -> Keys:
        """See `Watcher.scalar`."""
        return self

    def closes(self) -> Keys:
        """See `Watcher.closes`."""
        assert self.outer is not None
        return self.outer

    def continues(self) -> Keys:
        """See `Watcher.continues`."""
        return self
