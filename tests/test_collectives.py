"""Every collective gives the bits of the executable sum, whatever the size, dtype, transport or world."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    CANARY_BITS,
    DTYPES,
    WORLD_SIZES,
    assert_bits_equal,
    bits,
    canary,
    canary_sum,
    cancelling,
    exactly_summable,
    numpy_dtype,
    run_python,
)
from ranks import (
    OPERATIONS,
    OTHER_ORDERS,
    SPMD,
    TRANSPORTS,
    Spmd,
    Transport,
    open_collective,
    per_rank,
    reference,
    telling,
)

from jaxdp import tree_sum

KIB, MIB = 1 << 10, 1 << 20
TAILS = {"local": range(1, 34), "xla": (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33)}
ROUTE_LIMITS = (256 * KIB, 768 * KIB, 2 * MIB + 128 * KIB)  # the MI300X table's
BIG = {"float32": 2.0**24, "float16": 2048.0, "bfloat16": 256.0}
BLOCKS = [(3, (5,)), (1, ()), (1, (3, 7))]  # the leading axis over the world size, and the other axes
NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def from_bits(patterns: Any, dtype: str) -> np.ndarray:
    target = numpy_dtype(dtype)
    return np.array(patterns, f"u{target.itemsize}").view(target)


def columns(values: list[float], dtype: str) -> np.ndarray:
    """One element a rank: `values[rank]`."""
    return np.array(values, numpy_dtype(dtype)).reshape(-1, 1)


def all_reduced(x: np.ndarray, transport: Transport, spmd: Spmd = "pmap") -> np.ndarray:
    with open_collective(len(x), transport) as collective:
        return per_rank(collective.all_reduce, len(x), spmd)(x)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_short_length_of_every_dtype_has_the_tree_s_bits(world_size: int, transport: Transport) -> None:
    inputs = [telling((world_size, n), numpy_dtype(dtype), n) for n in TAILS[transport] for dtype in DTYPES]
    with open_collective(world_size, transport) as collective:
        sums = per_rank(lambda lanes: [collective.all_reduce(lane) for lane in lanes], world_size)(inputs)
    for x, total in zip(inputs, sums, strict=True):
        assert_bits_equal(total, reference("all_reduce", x), f"{x.dtype}[{x.shape[1]}]")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("spmd", SPMD)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_operation_has_the_tree_s_bits_in_every_shape(
        world_size: int, spmd: Spmd, operation: str, transport: Transport) -> None:
    blocks = BLOCKS if transport == "local" else BLOCKS[:1]
    shapes = [(world_size, world_size * n, *tail) for n, tail in blocks]
    inputs = [telling(shape, numpy_dtype(dtype), len(shape)) for shape in shapes for dtype in DTYPES]
    with open_collective(world_size, transport) as collective:
        outputs = per_rank(lambda lanes: [getattr(collective, operation)(lane) for lane in lanes],
                           world_size, spmd)(inputs)
    for x, output in zip(inputs, outputs, strict=True):
        assert_bits_equal(output, reference(operation, x), f"{operation} of {x.dtype}{list(x.shape[1:])}")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_empty_arrays_keep_their_shape_and_dtype(operation: str, transport: Transport) -> None:
    inputs = [np.zeros((4, *shape), np.float16) for shape in [(0,), (0, 3), (4, 0)]]
    with open_collective(4, transport) as collective:
        outputs = per_rank(lambda lanes: [getattr(collective, operation)(lane) for lane in lanes], 4)(inputs)
    for x, output in zip(inputs, outputs, strict=True):
        assert_bits_equal(output, reference(operation, x), f"{operation} of {list(x.shape[1:])}")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_0d_array_is_reduced_and_stays_0d(world_size: int, transport: Transport) -> None:
    x = cancelling(world_size, 1, "float32").reshape(world_size)
    assert_bits_equal(all_reduced(x, transport), reference("all_reduce", x))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_mebibyte_and_one_element_has_the_tree_s_bits(world_size: int, transport: Transport) -> None:
    x = telling((world_size, MIB // 4 + 1), np.dtype(np.float32), world_size)
    assert_bits_equal(all_reduced(x, transport), reference("all_reduce", x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [4, 8])
def test_the_canary_is_one_constant_around_every_routing_limit(
        world_size: int, dtype: str, transport: Transport) -> None:
    """Another route must not be another order. The xla transport, which has no routes, is asked once."""
    steps = (-1, 0, 1) if transport == "local" else (1,)
    limits = [limit // numpy_dtype(dtype).itemsize for limit in ROUTE_LIMITS[-len(steps):]]
    lengths = [limit + step for limit in limits for step in steps]
    blocks = [limit + step * world_size for limit in limits for step in steps]
    x = canary(world_size, max(blocks), dtype)
    with open_collective(world_size, transport) as collective:
        sums, scattered = per_rank(lambda whole, multiples: (
            [collective.all_reduce(x) for x in whole], [collective.reduce_scatter(x) for x in multiples],
        ), world_size)([x[:, :n] for n in lengths], [x[:, :n] for n in blocks])
    assert [total.shape[1] for total in sums] == lengths
    assert [total.shape[1] * world_size for total in scattered] == blocks
    for total in [*sums, *scattered]:
        assert (bits(total) == CANARY_BITS[world_size, dtype]).all(), total.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_of_the_sum_is_the_sum_of_the_prefix(dtype: str, transport: Transport) -> None:
    x = cancelling(4, 393_217, dtype)
    lengths = (1, 31, 4097, 393_216)
    with open_collective(4, transport) as collective:
        whole, prefixes = per_rank(lambda x: (
            collective.all_reduce(x), [collective.all_reduce(x[:n]) for n in lengths]), 4)(x)
    for n, prefix in zip(lengths, prefixes, strict=True):
        assert_bits_equal(prefix, whole[:, :n], f"the first {n}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_are_added_first(dtype: str, transport: Transport) -> None:
    """2 in the contract's order; 1 or 0 when ranks 0 and 2, or 0 and W/2, meet first."""
    big = BIG[dtype]
    for values in ([big, -big, 1, 1], [big, 0, -big, 0, 1, 0, 1, 0]):
        assert (all_reduced(columns(values, dtype), transport) == 2).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_canaries_tell_the_tree_from_every_other_order(dtype: str, transport: Transport) -> None:
    """The negative control: NumPy models of other orders fail where the collective passes."""
    big = BIG[dtype]
    inputs = [canary(4, 8, dtype), canary(8, 16, dtype), columns([big, -big, 1, 1], dtype),
              columns([big, 0, -big, 0, 1, 0, 1, 0], dtype)]
    right = [tree_sum(x) for x in inputs]
    for x, total in zip(inputs, right, strict=True):
        assert_bits_equal(all_reduced(x, transport)[0], total)
    for name, order in OTHER_ORDERS.items():
        differs = [(bits(order(x)) != bits(total)).any() for x, total in zip(inputs, right, strict=True)]
        assert any(differs[::2]), f"no canary of world 4 tells {name} from the tree"
        assert any(differs[1::2]), f"no canary of world 8 tells {name} from the tree"


@pytest.mark.parametrize("count", [1, 4099])
def test_four_ranks_of_256_1_1_1_agree_on_258(count: int, transport: Transport) -> None:
    x = np.repeat(columns([256, 1, 1, 1], "bfloat16"), count, axis=1)
    assert (bits(all_reduced(x, transport)) == 0x4381).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_input_reaches_only_its_own_element_and_no_later_call(dtype: str, transport: Transport) -> None:
    clean = exactly_summable(2, 9, dtype)
    x = clean.copy()
    x[1, 3], x[0, 5], x[1, 5], x[0, 7] = np.nan, np.inf, -np.inf, np.inf
    with open_collective(2, transport) as collective:
        reduce = per_rank(collective.all_reduce, 2)
        total, after = reduce(x), reduce(clean)
    assert_bits_equal(total, reference("all_reduce", x))
    assert bits(total)[:, [3, 5]].tolist() == [[NAN[dtype]] * 2] * 2
    assert (total[:, 7] == np.inf).all()
    finite = [0, 1, 2, 4, 6, 8]
    assert_bits_equal(total[:, finite], after[:, finite])
    assert_bits_equal(after, reference("all_reduce", clean))


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_and_signed_zeros_are_kept(dtype: str, transport: Transport) -> None:
    sign = 1 << (8 * numpy_dtype(dtype).itemsize - 1)
    x = from_bits([[1, sign | 1, sign, sign, 1, 0x7F], [1, sign | 1, sign, 0, sign | 1, 1]], dtype)
    assert bits(all_reduced(x, transport)).tolist() == [[2, sign | 2, sign, 0, 0, 0x80]] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 8])
def test_a_nan_sum_is_the_canonical_nan(world_size: int, dtype: str, transport: Transport) -> None:
    """Whatever the sign and payload of the NaN that made it, also where two NaNs or infinities meet."""
    x = np.zeros((world_size, 4), numpy_dtype(dtype))
    sign = 1 << (8 * x.dtype.itemsize - 1)
    x[1, 0] = from_bits(NAN[dtype] | 1, dtype)
    x[0, 1] = from_bits(NAN[dtype] | sign, dtype)
    x[:, 2] = from_bits(NAN[dtype] | sign | 3, dtype)
    x[:2, 3] = [np.inf, -np.inf]
    assert (bits(all_reduced(x, transport)) == NAN[dtype]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_copies_bits_payload_included(dtype: str, transport: Transport) -> None:
    sign = 1 << (8 * numpy_dtype(dtype).itemsize - 1)
    signalling = NAN[dtype] - (NAN[dtype] & -NAN[dtype]) + 1
    x = from_bits([[NAN[dtype] | 1, NAN[dtype] | sign, signalling, sign, 1]], dtype)
    with open_collective(1, transport) as collective:
        copies = per_rank(lambda x: [getattr(collective, operation)(x) for operation in OPERATIONS], 1)(x)
    for copy in copies:
        assert_bits_equal(copy, x)


@pytest.mark.parametrize("world_size", [2, 8])
def test_all_gather_copies_the_bits_of_every_dtype(world_size: int, transport: Transport) -> None:
    floats = [*map(numpy_dtype, DTYPES), np.dtype(ml_dtypes.float8_e4m3fn)]
    integers = [np.int8, np.uint16, np.int32]
    inputs = [telling((world_size, 3, 5), f, 1) for f in floats[:3]]
    for dtype, x in zip(DTYPES, inputs, strict=True):
        x[:, 0, 0] = from_bits(NAN[dtype] | 1, dtype)
    inputs += [np.arange(world_size * 15).reshape(world_size, 3, 5).astype(d) for d in [*integers, floats[3]]]
    inputs += [np.arange(world_size * 15).reshape(world_size, 3, 5) % 3 == 0]
    inputs += [telling((world_size, 3, 5, 2), np.dtype(np.float32), 2).view(np.complex64)[..., 0]]
    with open_collective(world_size, transport) as collective:
        outputs = per_rank(lambda lanes: [collective.all_gather(lane) for lane in lanes], world_size)(inputs)
    for x, output in zip(inputs, outputs, strict=True):
        gathered = reference("all_gather", x)
        if x.dtype == np.complex64:
            output, gathered = output.view(np.float32), gathered.view(np.float32)
        assert_bits_equal(output, gathered, str(x.dtype))


def test_all_gather_of_four_bit_integers_is_right_or_refused(transport: Transport) -> None:
    """XLA packs two to a byte. In a process of its own, because a copy of too many bytes breaks the heap."""
    code = """
import sys, jax, jax.numpy as jnp, jaxdp
with jaxdp.create_deterministic_collective(jax.devices()[:4], transport=sys.argv[1]) as collective:
    gather = jax.pmap(lambda x: collective.all_gather(x.astype(jnp.int4)).astype(jnp.int8), devices=jax.devices()[:4],
                      axis_name="ranks")
    try:
        print(gather(jnp.arange(-8, 4, dtype=jnp.int8).reshape(4, 3)).tolist())
    except TypeError as error:
        print(error)
"""
    done = run_python(code, transport, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert "int4" in done.stdout or done.stdout.strip() == str([list(range(-8, 4))] * 4)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_many_lanes_in_one_call_have_the_bits_of_one_call_each(world_size: int, transport: Transport) -> None:
    inputs = [telling((world_size, world_size * n, 3), numpy_dtype(dtype), n) for n in (1, 7) for dtype in DTYPES]
    with open_collective(world_size, transport) as collective:
        many = per_rank(lambda lanes: {
            "all_reduce": collective.all_reduce_many(lanes),
            "reduce_scatter": collective.reduce_scatter_many(lanes)}, world_size)(inputs)
    for operation, outputs in many.items():
        assert len(outputs) == len(inputs)
        for x, output in zip(inputs, outputs, strict=True):
            assert_bits_equal(output, reference(operation, x), operation)


def test_each_lane_inside_one_array_is_its_own(transport: Transport) -> None:
    """Lane k holds k on both ranks: 2, 4, 6, 8, by one call a lane, by one call, and by two communicators."""
    x = np.repeat(np.arange(1, 5, dtype=np.float32), 33).reshape(1, 4, 33).repeat(2, axis=0)
    with open_collective(2, transport) as first, open_collective(2, transport) as second:
        ways = per_rank(lambda x: [
            [first.all_reduce(x[k]) for k in range(4)],
            first.all_reduce_many([x[k] for k in range(4)]),
            [(first, second)[k % 2].all_reduce(x[k]) for k in range(4)]], 2)(x)
    for lanes in ways:
        assert [np.unique(lane).tolist() for lane in lanes] == [[2], [4], [6], [8]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_canary_holds_in_every_lane_and_world(dtype: str, transport: Transport) -> None:
    for world_size in WORLD_SIZES:
        x = canary(world_size, 24, dtype)
        with open_collective(world_size, transport) as collective:
            whole, lanes = per_rank(lambda x, c=collective: (
                c.all_reduce(x), c.all_reduce_many([x[:5], x[5:]])), world_size)(x)
        expected = np.stack([canary_sum(world_size, 24, dtype)] * world_size)
        assert_bits_equal(whole, expected)
        assert_bits_equal(np.concatenate(lanes, axis=1), expected)
