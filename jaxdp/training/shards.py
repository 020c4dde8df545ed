"""Local shards as canonical sibling subtrees of the one tree over all shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SiblingTree:
    """Combines leaves that come in order into the balanced tree, as soon as two siblings are there.

    Works like a binary counter: at most log2(n) + 1 values are alive for n leaves. `n` must be a
    power of two when `root` is taken.
    """

    def __init__(self, add: Callable[[Any, Any], Any]) -> None:
        self._add = add
        self._pending: list[tuple[int, Any]] = []  # (number of leaves, value), larger subtrees first

    def push(self, value: Any) -> None:
        """Adds the next leaf."""
        size = 1
        while self._pending and self._pending[-1][0] == size:
            value = self._add(self._pending.pop()[1], value)
            size *= 2
        self._pending.append((size, value))

    @property
    def alive(self) -> int:
        """How many values are held."""
        return len(self._pending)

    def root(self) -> Any:
        """The sum of all leaves; raises ValueError unless their number is a power of two."""
        if len(self._pending) != 1:
            raise ValueError(f"the tree has {sum(size for size, _ in self._pending)} leaves; it needs a power of two.")
        return self._pending.pop()[1]
