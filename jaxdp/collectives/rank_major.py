"""The `xla` transport: bytes travel by XLA's own collectives, the tree runs locally.

XLA moves bits unchanged in `all_gather` and `all_to_all`; it never adds. This is the fallback, and
the way between nodes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax._src import core

from jaxdp.collectives.operations import Operation, tree_sum_leading


def axis_name(world: int) -> str:
    """The one mapped axis of size `world` in scope.

    Raises ValueError if none or several are: the transport needs to know which ranks to join.
    """
    sizes = core.get_axis_env().axis_sizes
    names = [name for name, size in sizes.items() if size == world]
    if len(names) != 1:
        raise ValueError(f"the xla transport needs exactly one mapped axis of size {world} (pmap or shard_map); "
                         f"in scope are {dict(sizes)}.")
    return str(names[0])


def run(operation: Operation, world: int, lanes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """One collective over `lanes`; shapes as in `operations.bind`."""
    axis = axis_name(world)
    if operation == Operation.BARRIER:
        _barrier(axis)
        return ()
    one_lane = {Operation.ALL_REDUCE: _all_reduce, Operation.ALL_GATHER: _all_gather,
                Operation.REDUCE_SCATTER: _reduce_scatter}[operation]
    return tuple(one_lane(axis, world, x) for x in lanes)


def _all_reduce(axis: str, world: int, x: jax.Array) -> jax.Array:
    del world
    return tree_sum_leading(jax.lax.all_gather(x, axis))


def _all_gather(axis: str, world: int, x: jax.Array) -> jax.Array:
    del world
    return jax.lax.all_gather(x, axis, tiled=True)


def _reduce_scatter(axis: str, world: int, x: jax.Array) -> jax.Array:
    blocks = x.reshape(world, x.shape[0] // world, *x.shape[1:])
    return tree_sum_leading(jax.lax.all_to_all(blocks, axis, split_axis=0, concat_axis=0))


def _barrier(axis: str) -> None:
    arrived = jax.lax.all_gather(jnp.zeros(1, jnp.float32), axis)
    # A side effect on the gathered value keeps XLA from dropping it.
    jax.ffi.ffi_call("jaxdp_tree_sum", jax.ShapeDtypeStruct((1,), jnp.float32), has_side_effect=True)(arrived)
