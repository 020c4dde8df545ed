"""Which gradients travel together: a pure plan from leaf shapes and one byte limit to buckets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from jaxdp.errors import ConfigError
from jaxdp.leaves import LeafSpec, leaf_specs

REDUCED_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are reduced as one flat array, packed in order without gaps."""

    index: int
    dtype: np.dtype[Any]
    leaves: tuple[LeafSpec, ...]

    @property
    def elements(self) -> int:
        """The length of the flat array."""
        return sum(leaf.elements for leaf in self.leaves)

    @property
    def bytes(self) -> int:
        """The size of the flat array in bytes."""
        return self.elements * self.dtype.itemsize

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each leaf starts in the flat array, in elements."""
        return tuple(itertools.accumulate((leaf.elements for leaf in self.leaves[:-1]), initial=0))


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Every leaf of one tree, each in exactly one bucket or passed through. Plans compare by value.

    `buckets` are ordered by their first leaf; `passed_through` are the leaves that are not reduced
    (any dtype but float32, float16 and bfloat16), in canonical order.
    """

    buckets: tuple[Bucket, ...]
    passed_through: tuple[LeafSpec, ...]
    maximum_bucket_bytes: int

    @property
    def parameter_count(self) -> int:
        """The number of leaves (tensors) in buckets."""
        return sum(len(bucket.leaves) for bucket in self.buckets)

    @property
    def element_count(self) -> int:
        """The number of elements in buckets."""
        return sum(bucket.elements for bucket in self.buckets)

    def __str__(self) -> str:
        """A table for people: one line a bucket, then the leaves that are passed through."""
        lines = ["bucket  dtype     leaves        bytes  first .. last"]
        lines += [f"{b.index:>6}  {b.dtype.name:<8}  {len(b.leaves):>6} {b.bytes:>12,}  "
                  f"{b.leaves[0].name} .. {b.leaves[-1].name}" for b in self.buckets]
        lines += [f"     -  {leaf.dtype.name:<8}  {1:>6} {leaf.bytes:>12,}  {leaf.name} (passed through)"
                  for leaf in self.passed_through]
        return "\n".join(lines)


def plan_buckets(tree: Any, maximum_bucket_bytes: int) -> BucketPlan:
    """Packs the leaves of `tree` (arrays, `ShapeDtypeStruct`s or tracers) into buckets.

    Greedy in canonical order: a bucket takes leaf after leaf and closes before it would exceed
    `maximum_bucket_bytes`, so a leaf above the limit travels alone. Each dtype fills buckets of its
    own as if the other dtypes were not there, so that float32 scales between bfloat16 matrices cost
    no extra bucket. Pure: equal shapes, dtypes, names and limit give equal plans.

    Raises `ConfigError` unless the limit is an integer of at least 1.
    """
    if type(maximum_bucket_bytes) is not int or maximum_bucket_bytes < 1:
        raise ConfigError("maximum_bucket_bytes", maximum_bucket_bytes, "an integer of at least 1")
    specs = leaf_specs(tree)
    groups = [group for dtype in REDUCED_DTYPES
              for group in _greedy((leaf for leaf in specs if leaf.dtype == dtype), maximum_bucket_bytes)]
    groups.sort(key=lambda group: group[0].index)
    return BucketPlan(
        buckets=tuple(Bucket(index, group[0].dtype, group) for index, group in enumerate(groups)),
        passed_through=tuple(leaf for leaf in specs if leaf.dtype not in REDUCED_DTYPES),
        maximum_bucket_bytes=maximum_bucket_bytes)


def _greedy(leaves: Iterable[LeafSpec], maximum_bytes: int) -> Iterator[tuple[LeafSpec, ...]]:
    """Consecutive runs of `leaves`, each as long as its bytes stay within the limit."""
    group: list[LeafSpec] = []
    group_bytes = 0
    for leaf in leaves:
        if group and group_bytes + leaf.bytes > maximum_bytes:
            yield tuple(group)
            group, group_bytes = [], 0
        group.append(leaf)
        group_bytes += leaf.bytes
    if group:
        yield tuple(group)
