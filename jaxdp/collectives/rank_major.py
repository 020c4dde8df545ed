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
    return tree_sum_leading(_restore(jax.lax.all_gather(_words(x), axis), x))


def _all_gather(axis: str, world: int, x: jax.Array) -> jax.Array:
    if x.size == 0:  # XLA gathers no empty leading axis
        return jnp.zeros((world * x.shape[0], *x.shape[1:]), x.dtype)
    return _restore(jax.lax.all_gather(_words(x), axis, tiled=True), x)


def _reduce_scatter(axis: str, world: int, x: jax.Array) -> jax.Array:
    blocks = _words(x).reshape(world, x.shape[0] // world, *x.shape[1:])
    return tree_sum_leading(_restore(jax.lax.all_to_all(blocks, axis, split_axis=0, concat_axis=0), x))


def _words(x: jax.Array) -> jax.Array:
    """16-bit floats travel as integers: XLA's CPU collectives take bfloat16 through float32, which
    rewrites the payload of a NaN."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype in (jnp.float16, jnp.bfloat16) else x


def _restore(words: jax.Array, like: jax.Array) -> jax.Array:
    return words if words.dtype == like.dtype else jax.lax.bitcast_convert_type(words, like.dtype)


def _barrier(axis: str) -> None:
    arrived = jax.lax.all_gather(jnp.zeros(1, jnp.float32), axis)
    # A side effect on the gathered value keeps XLA from dropping it.
    jax.ffi.ffi_call("jaxdp_tree_sum", jax.ShapeDtypeStruct((1,), jnp.float32), has_side_effect=True)(arrived)
