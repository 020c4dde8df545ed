"""The helpers that other tests trust."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPES, assert_bits_equal, bits, canary, canary_sum, cancelling, exactly_summable


def _balanced(values: np.ndarray) -> np.ndarray:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return _balanced(values[:half]) + _balanced(values[half:])


def _rank_order(values: np.ndarray) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_canary_sums_to_its_constant_by_the_balanced_tree(world_size: int, dtype: str) -> None:
    assert_bits_equal(_balanced(canary(world_size, 19, dtype)), canary_sum(world_size, 19, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [4, 8])
def test_the_canary_tells_the_balanced_tree_from_rank_order(world_size: int, dtype: str) -> None:
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bits_equal(_rank_order(canary(world_size, 19, dtype)), canary_sum(world_size, 19, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_summable_inputs_have_one_sum_in_every_order(dtype: str) -> None:
    values = exactly_summable(8, 64, dtype)
    assert_bits_equal(_balanced(values), _rank_order(values))
    assert_bits_equal(_balanced(values), _balanced(values[::-1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cancelling_inputs_have_sums_that_depend_on_order(dtype: str) -> None:
    values = cancelling(8, 256, dtype)
    assert np.isfinite(values.astype(np.float32)).all()
    assert (bits(_balanced(values)) != bits(_rank_order(values))).sum() > 64


def test_assert_bits_equal_names_the_first_difference_and_both_patterns() -> None:
    expected = np.zeros((2, 3), np.float32)
    actual = expected.copy()
    actual[1, 2] = -0.0
    with pytest.raises(AssertionError, match=r"1 of 6 .*\(1, 2\): 0x80000000 .*0x00000000"):
        assert_bits_equal(actual, expected)


@pytest.mark.parametrize(("actual", "expected"), [
    (np.float32(1), np.float64(1)), (np.zeros(1, np.float32), np.zeros((), np.float32)),
    (np.array([0x7FC00000], np.uint32).view(np.float32), np.array([0x7FC00123], np.uint32).view(np.float32)),
])
def test_assert_bits_equal_refuses_another_dtype_shape_or_nan_payload(actual: np.ndarray, expected: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        assert_bits_equal(actual, expected)


def test_assert_bits_equal_accepts_equal_nans_scalars_and_empty_arrays() -> None:
    for value in (np.array(np.nan, np.float32), np.zeros((0, 3), np.float16), np.asfortranarray(np.ones((2, 3)))):
        assert_bits_equal(value, value.copy())
