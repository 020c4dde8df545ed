"""The collectives as a JAX primitive, and their gradients.

One primitive carries every operation over one or more arrays ("lanes"). It has an ordered effect,
so JAX threads a token through all calls of a program, in the order in which they were traced,
through scans, branches and nested functions too; XLA keeps that order on every backend. (Measured
on CPU with eight devices: a side effect alone does not order calls, the token does.)
"""

from __future__ import annotations

import atexit
import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config, core, dispatch, effects
from jax._src.interpreters import batching, mlir
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import hlo


class Operation(enum.IntEnum):
    """Operation codes shared with native code."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BARRIER = 3


class CollectiveEffect(effects.Effect):
    """The order of one communicator's calls: a failure of one does not reach the tokens of another."""

    def __init__(self, group: int) -> None:
        self.group = group

    def __str__(self) -> str:
        return f"jaxdp communicator {self.group}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveEffect) and other.group == self.group

    def __hash__(self) -> int:
        return hash((CollectiveEffect, self.group))


for _kind in (effects.ordered_effects, effects.shardable_ordered_effects, effects.lowerable_effects,
              effects.control_flow_allowed_effects, effects.custom_derivatives_allowed_effects,
              effects.remat_allowed_effects):
    _kind.add_type(CollectiveEffect)

class _HostOrdered(effects.Effect):
    """An unordered effect beside the ordered one. JAX's fast path for programs compiled ahead of time
    looks for this kind alone, and without it would leave out the token."""

    def __str__(self) -> str:
        return "jaxdp host order"


_HOST_ORDERED = _HostOrdered()
for _kind in (effects.lowerable_effects, effects.control_flow_allowed_effects,
              effects.custom_derivatives_allowed_effects, effects.remat_allowed_effects):
    _kind.add_type(_HostOrdered)

collective_p = core.Primitive("jaxdp_collective")
collective_p.multiple_results = True
collective_p.def_impl(functools.partial(dispatch.apply_primitive, collective_p))


def result_shape(operation: Operation, shape: tuple[int, ...], world: int) -> tuple[int, ...]:
    """Shape of one lane's result."""
    if operation == Operation.ALL_GATHER:
        return (shape[0] * world, *shape[1:])
    if operation == Operation.REDUCE_SCATTER:
        return (shape[0] // world, *shape[1:])
    return shape


def signature(operation: Operation, avals: Sequence[Any]) -> str:
    """What ranks compare before any arithmetic, e.g. `all_reduce float32[3,4] float32[7]`."""
    lanes = [f"{np.dtype(aval.dtype).name}[{','.join(map(str, aval.shape))}]" for aval in avals]
    return " ".join([operation.name.lower(), *lanes])


@collective_p.def_effectful_abstract_eval
def _abstract(*avals: Any, group: int, operation: Operation, world: int) -> tuple[list[Any], set[Any]]:
    results = [aval.update(shape=result_shape(operation, aval.shape, world)) for aval in avals]
    return results, {CollectiveEffect(group), _HOST_ORDERED}


def _lower(ctx: mlir.LoweringRuleContext, *operands: ir.Value, group: int, operation: Operation,
           world: int) -> Sequence[ir.Value]:
    effect = CollectiveEffect(group)
    results = [ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype)) for aval in ctx.avals_out]
    integer = {"group": (64, group), "operation": (32, int(operation)), "world": (32, world),
               "lanes": (32, len(operands))}
    attributes: dict[str, Any] = {name: ir.IntegerAttr.get(ir.IntegerType.get_signless(bits), value)
                                  for name, (bits, value) in integer.items()}
    attributes["divided"] = ir.BoolAttr.get(False)
    attributes["signature"] = ir.StringAttr.get(signature(operation, ctx.avals_in))
    call = mlir.custom_call(
        "jaxdp_collective", api_version=4, has_side_effect=True, backend_config=attributes,
        operands=[ctx.tokens_in.get(effect), *operands], result_types=[hlo.TokenType.get(), *results],
        # Row-major, always: a layout of the compiler's choice would misplace elements.
        operand_layouts=[(), *(_row_major(aval) for aval in ctx.avals_in)],
        result_layouts=[(), *(_row_major(aval) for aval in ctx.avals_out)])
    ctx.set_tokens_out(mlir.TokenSet({effect: call.results[0]}))
    return call.results[1:]


def _row_major(aval: Any) -> tuple[int, ...]:
    return tuple(reversed(range(len(aval.shape))))


for _platform in ("cpu", "cuda", "rocm"):
    mlir.register_lowering(collective_p, _lower, platform=_platform)


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    # The batch axis goes last: the leading axis keeps its meaning.
    moved = [x if dim is None else jnp.moveaxis(x, dim, -1) for x, dim in zip(operands, dims, strict=True)]
    results = collective_p.bind(*moved, **params)
    return results, [dim if dim is None else result.ndim - 1
                     for result, dim in zip(results, dims, strict=True)]


batching.primitive_batchers[collective_p] = _batch

def bind(group: int, operation: Operation, world: int, lanes: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Runs one collective of a native group over `lanes` (local shapes); as many results as lanes."""
    return tuple(collective_p.bind(*lanes, group=group, operation=operation, world=world))


def is_summed_already(x: jax.Array) -> bool:
    """Whether `shard_map(check_vma=True)` holds `x` for equal on all ranks.

    There the gradient of a replicated parameter comes summed over ranks by JAX itself; summing it
    again would multiply it by the world size, in silence.
    """
    in_shard_map = bool(core.get_axis_env().axis_sizes) and config._check_vma.value
    return in_shard_map and not jax.typeof(x).manual_axis_type.varying


def first_order() -> jax.Array:
    """What the first of a chain of `bind_chained` calls takes."""
    return jnp.zeros(1, jnp.uint32)


def bind_chained(group: int, operation: Operation, world: int, lanes: Sequence[jax.Array],
                 order: jax.Array, divisor: jax.Array | None = None) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """As `bind`, ordered by data instead of by an effect: takes the `order` that the call before returned.

    A program whose calls are all chained is dispatched asynchronously and by JAX's fast path; an
    ordered effect makes the host wait for the program before. The price is that the caller must
    chain every call itself, at the top level of one traced function. `divisor`, a float32 scalar, is
    what the root of an all_reduce is divided by; GPUs only.
    """
    results = [jax.ShapeDtypeStruct(result_shape(operation, lane.shape, world), lane.dtype) for lane in lanes]
    # A sum may be written over its input: gradients are not read again, and half the memory is touched.
    first = 1 if divisor is None else 2
    aliases = {first + i: 1 + i for i in range(len(lanes))} if operation == Operation.ALL_REDUCE else {}
    call = jax.ffi.ffi_call("jaxdp_collective", [jax.ShapeDtypeStruct(order.shape, order.dtype), *results],
                            input_output_aliases=aliases)
    before = [order] if divisor is None else [order, divisor]
    order, *values = call(*before, *lanes, group=np.int64(group), operation=np.int32(operation), world=np.int32(world),
                          lanes=np.int32(len(lanes)), signature=signature(operation, lanes),
                          divided=np.bool_(divisor is not None))
    return tuple(values), order


def wait_for_order(group: int) -> None:
    """Returns when the programs that this thread has dispatched have made their calls of `group`."""
    token = dispatch.runtime_tokens.current_tokens.get(CollectiveEffect(group))
    if token is not None:
        _failed(token)


def forget_order(group: int) -> None:
    """Drops the runtime tokens that a failed or closed communicator left in JAX.

    Without this a failed call's error would be raised again at the end of the process.
    """
    tokens = dispatch.runtime_tokens
    tokens.current_tokens.pop(CollectiveEffect(group), None)
    for device in [device for device, token in tokens.output_runtime_tokens.items() if _failed(token)]:
        del tokens.output_runtime_tokens[device]


@atexit.register
def _forget_failures() -> None:
    """A failure was raised where it happened; JAX would print it again when the process ends."""
    tokens = dispatch.runtime_tokens.current_tokens
    ours = [(effect, token) for effect, token in tokens.items() if isinstance(effect, CollectiveEffect)]
    for effect in [effect for effect, token in ours if _failed(token)]:
        forget_order(effect.group)


def _failed(token: Any) -> bool:
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return True
    return False


@jax.custom_batching.custom_vmap
def tree_sum_leading(x: jax.Array) -> jax.Array:
    """`T` over the leading axis (1, 2, 4 or 8 rows) by the native tree, inside one program."""
    return jax.ffi.ffi_call("jaxdp_tree_sum", jax.ShapeDtypeStruct(x.shape[1:], x.dtype))(x)


@tree_sum_leading.def_vmap
def _tree_sum_of_batch(axis_size: int, in_batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    # The batch axis goes last: the sum is elementwise.
    del axis_size, in_batched
    return jnp.moveaxis(tree_sum_leading(jnp.moveaxis(x, 0, -1)), -1, 0), True


def tree_sum_many(siblings: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """`T` over 2, 4 or 8 siblings, each a list of arrays of the same shapes and dtypes.

    Operands of a custom call lie in memory, so no compiler contracts the multiply that made a
    gradient into the add.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in siblings[0]]
    flat = [x for sibling in siblings for x in sibling]
    return list(jax.ffi.ffi_call("jaxdp_tree_sum_many", shapes)(*flat, world=np.int32(len(siblings))))
