"""What the leaves of a pytree are called and look like: one naming for buckets, digests and checkpoints."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Any

import jax.tree_util as jtu
import numpy as np


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One leaf: its place in canonical (flatten) order, its name, and what it holds."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def elements(self) -> int:
        """The number of elements: 1 for a 0-d leaf, 0 for an empty one."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size of the leaf in bytes, packed."""
        return self.elements * self.dtype.itemsize


def leaf_specs(tree: Any) -> tuple[LeafSpec, ...]:
    """The leaves of `tree` in canonical order: arrays, `ShapeDtypeStruct`s or tracers alike.

    Raises `TypeError` for a leaf without shape and dtype, and what `leaf_names` raises.
    """
    pairs = zip(leaf_names(tree), jtu.tree_leaves(tree), strict=True)
    return tuple(_spec(index, name, leaf) for index, (name, leaf) in enumerate(pairs))


def leaf_names(tree: Any) -> tuple[str, ...]:
    """A readable path for each leaf of `tree` in canonical order, such as `layers/0/q`.

    Mapping keys, attributes and indices are joined by "/". As in a JSON pointer (RFC 6901) a "~" or
    "/" inside a key is written `~0` or `~1`; further, a text key that is empty or reads as an
    integer starts with `~2` (so `{0: ...}` is `0` and `{"0": ...}` is `~20`), and a key of another
    type is `~3` and its repr. A tree that is one leaf names it "". Raises `ValueError` where two
    leaves of a custom node share one name.
    """
    paths = [path for path, _ in jtu.tree_flatten_with_path(tree)[0]]
    names = tuple("/".join(map(_entry_text, path)) for path in paths)
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"each leaf needs a path of its own; {repeated[0]!r} names several. "
                         "Give the pytree node distinct keys.")
    return names


def _entry_text(entry: Any) -> str:
    match entry:
        case jtu.SequenceKey(idx=key) | jtu.DictKey(key=key) | jtu.FlattenedIndexKey(key=key):
            return _key_text(key)
        case jtu.GetAttrKey(name=key):
            return _key_text(key)
        case _:
            return _key_text(entry)


def _key_text(key: Any) -> str:
    if type(key) is int:
        return str(key)
    if type(key) is not str:
        return "~3" + _escaped(repr(key))
    return ("~2" if re.fullmatch(r"(-?[0-9]+)?", key) else "") + _escaped(key)


def _escaped(text: str) -> str:
    return text.replace("~", "~0").replace("/", "~1")


def _spec(index: int, name: str, leaf: Any) -> LeafSpec:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(f"every leaf must be an array; {name!r} is {type(leaf).__name__}. "
                        "Wrap it in jax.numpy.asarray.")
    return LeafSpec(index, name, tuple(leaf.shape), leaf.dtype)
