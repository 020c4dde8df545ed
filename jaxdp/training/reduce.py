"""Sums of gradients over ranks, bucket by bucket, and the one division at the root."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxdp.buckets import Bucket, BucketPlan, plan_buckets
from jaxdp.collectives import CallChain, DeterministicCollective

# XLA merges all-reduces after the program is written; these keep explicit psum buckets apart.
SEPARATE_BUCKETS = {
    "cpu": {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"},
    "gpu": {"xla_gpu_all_reduce_combine_threshold_bytes": 0},
}


class Reducer(Protocol):
    """How one bucket is summed and a small array gathered, inside a traced per-rank function."""

    def start(self) -> Reducer:
        """The reducer of one traced program of the trainer's own, called once at its beginning."""
        ...

    def sum_bucket(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The sums over ranks of arrays of one dtype."""
        ...

    def gather(self, x: jax.Array) -> jax.Array:
        """`(n, ...)` to `(W*n, ...)`, rank-major."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...


@dataclasses.dataclass(frozen=True)
class TreeReducer:
    """The strict tree: one call a bucket, every leaf an operand of its own."""

    collective: DeterministicCollective
    calls: DeterministicCollective | CallChain

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.collective.world_size

    def start(self) -> TreeReducer:
        """Calls ordered by data from here on."""
        return TreeReducer(self.collective, self.collective.chain())

    def sum_bucket(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """`T` over ranks of each leaf."""
        return self.calls.all_reduce_many(leaves)

    def gather(self, x: jax.Array) -> jax.Array:
        """`all_gather` of the collective."""
        return self.calls.all_gather(x)


@dataclasses.dataclass(frozen=True)
class PsumReducer:
    """XLA's own sum over the mapped axis `axis_name`: the vendor's order, no promise about bits.

    Compile with `SEPARATE_BUCKETS` for the platform, or XLA joins the buckets again.
    """

    axis_name: str
    world_size: int

    def start(self) -> PsumReducer:
        """XLA orders its own collectives."""
        return self

    def sum_bucket(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """One `psum` of the concatenated leaves."""
        flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
        total = jax.lax.psum(flat, self.axis_name)
        sums, start = [], 0
        for leaf in leaves:
            sums.append(total[start:start + leaf.size].reshape(leaf.shape))
            start += leaf.size
        return sums

    def gather(self, x: jax.Array) -> jax.Array:
        """`lax.all_gather`, tiled."""
        return jax.lax.all_gather(x, self.axis_name, tiled=True)


def sum_gradients(grads: Any, plan: BucketPlan, reducer: Reducer) -> Any:
    """Sums a tree of gradients over ranks; leaves that the plan passes through are left alone."""
    leaves, structure = jax.tree.flatten(grads)
    for bucket in plan.buckets:
        for leaf, total in zip(bucket.leaves, reducer.sum_bucket(_members(leaves, bucket)), strict=True):
            leaves[leaf.index] = total
    return structure.unflatten(leaves)


def all_reduce_gradients(grads: Any, plan: BucketPlan, *, reducer: DeterministicCollective | Reducer,
                         weight: Any = None) -> Any:
    """The mean of gradients over ranks, for use inside your own `pmap` or `shard_map` body.

    Args:
        grads: a pytree of local gradients. With `weight`, gradients of the summed loss.
        plan: `plan_buckets(grads, maximum_bucket_bytes)`.
        reducer: a `DeterministicCollective` (the strict tree) or a `PsumReducer`.
        weight: this rank's weight, a scalar (number of target tokens); None: every rank counts the same.

    Raises:
        ValueError: `plan` was made for a tree with other leaves.

    Returns:
        The same tree: `T(grads) / T(weight)`, or `T(grads) / world_size` without weight, in each
        leaf's dtype, divided once in float32. Integer and bool leaves are returned as they are.
    """
    if isinstance(reducer, DeterministicCollective):
        reducer = TreeReducer(reducer, reducer)
    if plan_buckets(grads, plan.maximum_bucket_bytes) != plan:
        raise ValueError("the plan is for a tree with other names, shapes or dtypes than grads; make it by "
                         "plan_buckets(grads, maximum_bucket_bytes).")
    sums = sum_gradients(grads, plan, reducer)
    total = jnp.float32(reducer.world_size)
    if weight is not None:
        total = reducer.sum_bucket([jnp.asarray(weight, jnp.float32).reshape(1)])[0][0]
    return divide(sums, plan, total)


def divide(sums: Any, plan: BucketPlan, total: jax.Array) -> Any:
    """Divides the reduced leaves by `total`, once, in float32, rounding to each leaf's dtype."""
    leaves, structure = jax.tree.flatten(sums)
    for bucket in plan.buckets:
        for leaf in bucket.leaves:
            wide = leaves[leaf.index].astype(jnp.float32) / total
            leaves[leaf.index] = wide.astype(bucket.dtype)
    return structure.unflatten(leaves)


def _members(leaves: Sequence[jax.Array], bucket: Bucket) -> list[jax.Array]:
    return [leaves[leaf.index] for leaf in bucket.leaves]
