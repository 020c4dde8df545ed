"""`DeterministicCollective`: checks at trace time, routes, and hands lanes to a transport."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.collectives import rank_major, routing
from jaxdp.collectives.failures import named_failure
from jaxdp.collectives.native import NativeGroup
from jaxdp.collectives.operations import (
    Operation,
    bind,
    bind_chained,
    first_order,
    forget_order,
    is_summed_already,
    wait_for_order,
)
from jaxdp.errors import CommunicatorClosed

_SUB_BYTE_DTYPES = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
REDUCTION_DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a communicator is and does, all true statements."""

    backend: str
    transport: str
    transport_reason: str
    world_size: int
    device_names: tuple[str, ...]
    capacity_bytes: int
    timeout_s: float
    routes: routing.RouteTable
    reduction_order: str = "balanced_rank_tree"
    reduction_dtypes: tuple[str, ...] = REDUCTION_DTYPES
    supports_async_overlap: bool = False
    supports_compute_communication_fusion: bool = False


class DeterministicCollective:
    """Collectives whose sums are one fixed balanced tree over ranks.

    The operations are called inside a traced per-device function (`pmap`, `shard_map`, or `jit` in a
    ranked process) with local shapes; all ranks make the same calls in the same order. Use it as a
    context manager: leaving closes it, and a runtime error that carries a named failure
    (`RankMismatch`, `CollectiveTimeout`, `PeerFailure`, `CommunicatorClosed`) is raised by its name.
    """

    def __init__(self, capabilities: Capabilities, group: NativeGroup | None) -> None:
        self.capabilities = capabilities
        self._group = group
        self._closed = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.capabilities.world_size

    def all_reduce(self, x: Any) -> jax.Array:
        """`T` over ranks of a float32, float16 or bfloat16 array; same shape and dtype."""
        return self.all_reduce_many([x])[0]

    def all_reduce_many(self, lanes: Sequence[Any]) -> list[jax.Array]:
        """`all_reduce` of several arrays as one call: what a bucket of gradients is.

        Each array is an operand of its own, so nothing is concatenated and no bucket plan can move a
        fusion boundary. Bits as if called one by one.
        """
        return self._reduce(Operation.ALL_REDUCE, lanes)

    def all_gather(self, x: Any) -> jax.Array:
        """`(n, ...)` to `(W*n, ...)`, rank-major, bits copied; any dtype."""
        x = jnp.asarray(x)
        if x.ndim == 0:
            raise ValueError("all_gather needs a leading axis; got a 0-d array. Reshape it to (1,).")
        if x.dtype.name in _SUB_BYTE_DTYPES:
            raise TypeError(f"all_gather takes dtypes of whole bytes; got {x.dtype}. Cast it first.")
        self._check_capacity(Operation.ALL_GATHER, [x])
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self._run(Operation.ALL_GATHER, (x,))[0]
        return list(_differentiable(self, Operation.ALL_GATHER, (x,)))[0]  # noqa: RUF015

    def reduce_scatter(self, x: Any) -> jax.Array:
        """`(W*n, ...)` to `(n, ...)`: rank r keeps block r of `T`."""
        return self.reduce_scatter_many([x])[0]

    def reduce_scatter_many(self, lanes: Sequence[Any]) -> list[jax.Array]:
        """`reduce_scatter` of several arrays under one ready/done generation, each its own tree."""
        return self._reduce(Operation.REDUCE_SCATTER, lanes)

    def barrier(self) -> None:
        """Every rank arrives before any leaves."""
        self._run(Operation.BARRIER, ())

    def chain(self) -> CallChain:
        """The calls of one traced function, ordered by data (see `CallChain`)."""
        return CallChain(self)

    def calls(self, rank: int) -> int:
        """How many calls `rank` has issued so far (0 for the xla transport, which does not count)."""
        return 0 if self._group is None else self._group.calls(rank)

    def raise_if_failed(self) -> None:
        """Raises the failure that poisoned the communicator, or `CommunicatorClosed`."""
        if self._closed:
            raise CommunicatorClosed("the communicator was closed; create a new one.")
        text = "" if self._group is None else self._group.failure()
        named = named_failure(text)
        if named is not None:
            raise named

    def close(self) -> None:
        """Waits for calls in flight and every peer's acknowledgement or the deadline; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._group is not None:
            wait_for_order(self._group.handle)
            text = self._group.close()
            forget_order(self._group.handle)
            named = named_failure(text)
            if named is not None:
                raise named

    def __enter__(self) -> DeterministicCollective:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        del kind, trace
        named = named_failure(str(error)) if isinstance(error, jax.errors.JaxRuntimeError) else None
        try:
            self.close()
        except Exception:
            if error is None:
                raise
        if named is not None:
            raise named from error

    def _reduce(self, operation: Operation, lanes: Sequence[Any]) -> list[jax.Array]:
        return list(_differentiable(self, operation, self._checked(operation, lanes)))

    def _checked(self, operation: Operation, lanes: Sequence[Any]) -> tuple[jax.Array, ...]:
        arrays = tuple(jnp.asarray(x) for x in lanes)
        for x in arrays:
            self._check_reduction(operation, x)
        self._check_capacity(operation, arrays)
        return arrays

    def _check_reduction(self, operation: Operation, x: jax.Array) -> None:
        name = operation.name.lower()
        if np.dtype(x.dtype).name not in REDUCTION_DTYPES:
            raise TypeError(f"{name} takes {', '.join(REDUCTION_DTYPES)}; got {np.dtype(x.dtype).name}. Cast it first.")
        if is_summed_already(x):
            raise ValueError(f"{name} got a value that shard_map(check_vma=True) holds for equal on all ranks, such as "
                             "the gradient of a replicated parameter, which JAX has summed already. Use "
                             "shard_map(..., check_vma=False).")
        if operation == Operation.REDUCE_SCATTER and (x.ndim == 0 or x.shape[0] % self.world_size):
            raise ValueError(f"{name} needs a leading axis that the world size ({self.world_size}) divides; "
                             f"got shape {x.shape}. Pad the leading axis.")

    def _check_capacity(self, operation: Operation, arrays: Sequence[jax.Array]) -> None:
        total = sum(x.size * x.dtype.itemsize for x in arrays)
        if total > self.capabilities.capacity_bytes:
            raise ValueError(f"{operation.name.lower()} of {total} bytes exceeds capacity_bytes="
                             f"{self.capabilities.capacity_bytes}. Split it or create the communicator with more.")

    def _run(self, operation: Operation, lanes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        self.raise_if_failed()
        if self._group is None:
            return rank_major.run(operation, self.world_size, lanes)
        return bind(self._group.handle, operation, self.world_size, lanes)


class CallChain:
    """The collectives of one traced function, each taking a value that the one before returned.

    For programs that are run step after step: without an effect JAX dispatches them by its fast path
    and without waiting. Every collective of the function must be made through the chain, at the
    function's top level; results must be used, or XLA drops the call on every rank alike. Not
    differentiable.
    """

    def __init__(self, collective: DeterministicCollective) -> None:
        self._collective = collective
        self._order = first_order()

    def all_reduce_many(self, lanes: Sequence[Any]) -> list[jax.Array]:
        """As `DeterministicCollective.all_reduce_many`."""
        return list(self._run(Operation.ALL_REDUCE, self._collective._checked(Operation.ALL_REDUCE, lanes)))

    def reduce_scatter_many(self, lanes: Sequence[Any]) -> list[jax.Array]:
        """As `DeterministicCollective.reduce_scatter_many`."""
        return list(self._run(Operation.REDUCE_SCATTER, self._collective._checked(Operation.REDUCE_SCATTER, lanes)))

    def all_gather(self, x: jax.Array) -> jax.Array:
        """As `DeterministicCollective.all_gather`."""
        return self._run(Operation.ALL_GATHER, (x,))[0]

    def _run(self, operation: Operation, lanes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        collective = self._collective
        if collective._group is None:
            return collective._run(operation, lanes)
        collective.raise_if_failed()
        handle, world = collective._group.handle, collective.world_size
        results, self._order = bind_chained(handle, operation, world, lanes, self._order)
        return results


_TRANSPOSE = {Operation.ALL_REDUCE: Operation.ALL_REDUCE, Operation.ALL_GATHER: Operation.REDUCE_SCATTER,
              Operation.REDUCE_SCATTER: Operation.ALL_GATHER}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(collective: DeterministicCollective, operation: Operation,
                    lanes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return collective._run(operation, lanes)


def _forward(collective: DeterministicCollective, operation: Operation,
             lanes: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
    return _differentiable(collective, operation, lanes), None


def _backward(collective: DeterministicCollective, operation: Operation, residuals: None,
              cotangents: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...]]:
    del residuals
    return (_differentiable(collective, _TRANSPOSE[operation], cotangents),)


_differentiable.defvjp(_forward, _backward)
