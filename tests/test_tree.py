"""`tree_sum` is the balanced tree of correctly rounded IEEE adds, checked against exact arithmetic."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
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
    numpy_dtype,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.tree import tree_sum

FRACTION_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
EXPONENT_BITS = {"float32": 8, "float16": 5, "bfloat16": 8}
NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}


def from_bits(patterns: Any, dtype: str) -> np.ndarray:
    target = numpy_dtype(dtype)
    return np.asarray(patterns, f"u{target.itemsize}").view(target)


def infinity(dtype: str) -> int:
    return ((1 << EXPONENT_BITS[dtype]) - 1) << FRACTION_BITS[dtype]


def sign_bit(dtype: str) -> int:
    return 1 << (FRACTION_BITS[dtype] + EXPONENT_BITS[dtype])


def exact(pattern: int, dtype: str) -> Fraction:
    """The value of a finite bit pattern."""
    fraction_bits = FRACTION_BITS[dtype]
    biased, fraction = divmod(pattern & (sign_bit(dtype) - 1), 1 << fraction_bits)
    lowest = 2 - (1 << (EXPONENT_BITS[dtype] - 1)) - fraction_bits
    significand = fraction + ((1 << fraction_bits) if biased else 0)
    sign = -1 if pattern & sign_bit(dtype) else 1
    return sign * significand * Fraction(2) ** (lowest + max(biased, 1) - 1)


def rounded(value: Fraction, dtype: str) -> int:
    """The bit pattern nearest to a value other than zero, ties to even, overflow to infinity."""
    fraction_bits = FRACTION_BITS[dtype]
    quantum = Fraction(2) ** (2 - (1 << (EXPONENT_BITS[dtype] - 1)) - fraction_bits)
    magnitude = abs(value) / quantum
    steps = max(int(magnitude).bit_length() - fraction_bits - 1, 0)
    pattern = min(round(magnitude / 2**steps) + (steps << fraction_bits), infinity(dtype))
    return pattern | (sign_bit(dtype) if value < 0 else 0)


def exact_add(a: int, b: int, dtype: str) -> int:
    """One IEEE add of two bit patterns in rational arithmetic, a NaN being canonical."""
    top, sign = infinity(dtype), sign_bit(dtype)
    if a & (sign - 1) > top or b & (sign - 1) > top or {a, b} == {top, top | sign}:
        return NAN[dtype]
    for operand in (a, b):
        if operand & (sign - 1) == top:
            return operand
    total = exact(a, dtype) + exact(b, dtype)
    return rounded(total, dtype) if total else (a & b & sign)


def exact_tree(patterns: list[int], dtype: str) -> int:
    """The balanced tree from the leaves up, one level a turn."""
    while len(patterns) > 1:
        patterns = [exact_add(a, b, dtype) for a, b in zip(patterns[::2], patterns[1::2], strict=True)]
    return patterns[0]


def telling_patterns(dtype: str, count: int) -> list[int]:
    """Zeros, subnormals, ones, the largest finite numbers, infinities, NaNs, then random patterns."""
    top = infinity(dtype)
    one = top >> 1 & ~((1 << FRACTION_BITS[dtype]) - 1)
    smallest_normal = 1 << FRACTION_BITS[dtype]
    positive = [0, 1, 2, smallest_normal - 1, smallest_normal, smallest_normal + 1, one - 1, one, one + 1,
                top - smallest_normal, top - 1, top, top + 1, NAN[dtype], NAN[dtype] + 1]
    generator = np.random.default_rng(7)
    return [p | s for p in positive for s in (0, sign_bit(dtype))] + generator.integers(
        0, 2 * sign_bit(dtype), count).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_canary_gives_the_one_constant_at_every_size(world_size: int, dtype: str) -> None:
    for count in (1, 3, 33):
        assert_bits_equal(tree_sum(canary(world_size, count, dtype)), canary_sum(world_size, count, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [4, 8])
def test_the_canary_tells_the_tree_from_rank_order_and_from_wide_accumulation(world_size: int, dtype: str) -> None:
    x = canary(world_size, world_size, dtype)
    in_rank_order = x[0]
    for rank in x[1:]:
        in_rank_order = in_rank_order + rank
    wide = x.astype(np.float64).sum(0).astype(x.dtype)
    assert (bits(in_rank_order) != CANARY_BITS[world_size, dtype]).any()
    assert (bits(wide) != CANARY_BITS[world_size, dtype]).all()
    assert (bits(tree_sum(x)) == CANARY_BITS[world_size, dtype]).all()


@pytest.mark.parametrize(("dtype", "big"), [("float32", 2.0**24), ("float16", 2048), ("bfloat16", 256)])
def test_neighbours_are_added_first_which_the_canary_cannot_tell(dtype: str, big: float) -> None:
    """(x0+x1)+(x2+x3) is 2 here; (x0+x2)+(x1+x3) and (x0+x3)+(x1+x2) are 1."""
    four = np.array([big, -big, 1, 1], numpy_dtype(dtype))
    assert tree_sum(four) == 2
    assert (four[0] + four[2]) + (four[1] + four[3]) == (four[0] + four[3]) + (four[1] + four[2]) == 1
    eight = np.array([big, 0, -big, 0, 1, 0, 1, 0], numpy_dtype(dtype))
    assert tree_sum(eight) == 2


def test_four_ranks_of_256_1_1_1_in_bfloat16_give_258() -> None:
    for count in (1, 4099):
        x = np.repeat(np.array([[256], [1], [1], [1]], np.float32), count, axis=1).astype(numpy_dtype("bfloat16"))
        assert_bits_equal(tree_sum(x), from_bits([0x4381] * count, "bfloat16"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_inputs_reach_only_their_own_elements(dtype: str) -> None:
    x = np.ones((2, 9), numpy_dtype(dtype))
    x[1, 3], x[0, 5], x[1, 5], x[0, 7] = np.nan, np.inf, -np.inf, np.inf
    two = rounded(Fraction(2), dtype)
    expected = [two, two, two, NAN[dtype], two, NAN[dtype], two, infinity(dtype), two]
    assert_bits_equal(tree_sum(x), from_bits(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_telling_patterns_adds_as_exact_arithmetic_rounds(dtype: str) -> None:
    pairs = list(itertools.product(telling_patterns(dtype, 40), repeat=2))
    x = from_bits(np.array(pairs).T, dtype)
    assert_bits_equal(tree_sum(x), from_bits([exact_add(a, b, dtype) for a, b in pairs], dtype))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 3))
def test_any_bits_at_any_world_size_give_the_exactly_rounded_tree(
        data: st.DataObject, dtype: str, world_size: int, count: int) -> None:
    pattern = st.integers(0, 2 * sign_bit(dtype) - 1) | st.sampled_from(telling_patterns(dtype, 0))
    ranks = data.draw(st.lists(st.lists(pattern, min_size=count, max_size=count),
                               min_size=world_size, max_size=world_size))
    expected = [exact_tree(list(element), dtype) for element in zip(*ranks, strict=True)]
    assert_bits_equal(tree_sum(from_bits(ranks, dtype)), from_bits(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros_are_kept(dtype: str) -> None:
    zero, minus = 0, sign_bit(dtype)
    x = from_bits([[minus, minus, zero], [minus, zero, zero], [minus, minus, minus], [minus, minus, minus]], dtype)
    assert_bits_equal(tree_sum(x), from_bits([minus, zero, zero], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_are_kept_after_jax_has_computed(dtype: str) -> None:
    jax.jit(lambda x: x * 2)(jnp.ones(4096)).block_until_ready()
    x = from_bits([[1, 3], [1, sign_bit(dtype) | 1], [1, 0], [1, 0]], dtype)
    assert_bits_equal(tree_sum(x), from_bits([4, 2], dtype))


def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    raised: list[BaseException] = []

    def sum_in_callback() -> np.ndarray:
        try:
            return tree_sum(np.ones((2, 1), np.float32))
        except FloatingPointError as error:
            raised.append(error)
            return np.zeros(1, np.float32)

    jax.block_until_ready(jax.pure_callback(sum_in_callback, jax.ShapeDtypeStruct((1,), jnp.float32)))
    assert len(raised) == 1
    assert "flushes" in str(raised[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_is_copied_with_its_nan_payload(dtype: str) -> None:
    x = from_bits([[infinity(dtype) + 1, NAN[dtype] | sign_bit(dtype) | 3, 5]], dtype)
    total = tree_sum(x)
    assert_bits_equal(total, x[0])
    assert not np.shares_memory(total, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_follow_the_ranks_and_the_input_is_left_alone(dtype: str) -> None:
    for shape in ((), (0,), (2, 0, 3), (2, 3)):
        for world_size in WORLD_SIZES:
            x = cancelling(world_size, int(np.prod(shape)), dtype).reshape(world_size, *shape)
            before = x.copy()
            total = tree_sum(x)
            assert isinstance(total, np.ndarray)
            assert (total.shape, total.dtype) == (shape, x.dtype)
            assert_bits_equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_jax_arrays_sum_as_their_dense_copies(dtype: str) -> None:
    x = cancelling(8, 12, dtype)
    expected = tree_sum(x)
    assert_bits_equal(tree_sum(np.asfortranarray(x)), expected)
    assert_bits_equal(tree_sum(np.repeat(x, 2, axis=1)[:, ::2]), expected)
    assert_bits_equal(tree_sum(jnp.asarray(x)), expected)


def test_overflow_and_nan_raise_no_warning() -> None:
    x = np.array([[np.finfo(np.float32).max, np.inf], [np.finfo(np.float32).max, -np.inf]], np.float32)
    with np.errstate(all="raise"):
        assert_bits_equal(tree_sum(x), from_bits([0x7F800000, 0x7FC00000], "float32"))


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "complex64"])
def test_other_dtypes_are_refused_with_the_allowed_ones_named(dtype: str) -> None:
    with pytest.raises(TypeError, match=rf"float32, float16 or bfloat16; got {dtype}"):
        tree_sum(np.ones((2, 3), dtype))


@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (6, 2), (12,)])
def test_other_world_sizes_are_refused_with_the_allowed_ones_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"1, 2, 4, 8 or another power of two"):
        tree_sum(np.ones(shape, np.float32))
