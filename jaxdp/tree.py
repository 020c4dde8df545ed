"""The sum that every backend must reproduce bit for bit: one balanced tree of IEEE adds over ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

# The NaN of every sum, by dtype: quiet, positive, no payload.
CANONICAL_NAN: dict[np.dtype[Any], np.unsignedinteger[Any]] = {
    np.dtype(np.float32): np.uint32(0x7FC00000),
    np.dtype(np.float16): np.uint16(0x7E00),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7FC0),
}


def tree_sum(x: Any) -> np.ndarray:
    """`T` over the leading axis of `x`, which is the rank: `(W, ...)` to `(...)`, same dtype, a copy.

    `T(x) = x[0]` when W = 1 (bits copied, a NaN's payload included), else
    `T(first half) + T(second half)`. Each `+` is one IEEE add in the array's own dtype, rounded to
    nearest even; subnormals and signed zeros are kept; a NaN result is the `CANONICAL_NAN`.

    Raises `TypeError` unless the dtype is float32, float16 or bfloat16, `ValueError` unless W is a
    power of two, and `FloatingPointError` on a thread whose processor flushes subnormals to zero,
    as the threads do on which JAX runs host callbacks.
    """
    x = np.asarray(x)
    _check(x)
    if len(x) == 1:
        return x[0, ...].copy()
    _require_subnormals()
    with np.errstate(over="ignore", invalid="ignore"):
        return _with_canonical_nan(np.asarray(_balanced(x)))


def _balanced(x: np.ndarray) -> Any:
    if len(x) == 1:
        return x[0]
    half = len(x) // 2
    return _balanced(x[:half]) + _balanced(x[half:])


def _with_canonical_nan(total: np.ndarray) -> np.ndarray:
    nan = CANONICAL_NAN[total.dtype]
    return np.where(np.isnan(total), nan, total.view(nan.dtype)).view(total.dtype)


def _check(x: np.ndarray) -> None:
    if x.dtype not in CANONICAL_NAN:
        raise TypeError(f"tree_sum adds float32, float16 or bfloat16; got {x.dtype}.")
    world_size = len(x) if x.ndim else 0
    if world_size < 1 or world_size & (world_size - 1):
        raise ValueError(f"tree_sum needs a leading rank axis of 1, 2, 4, 8 or another power of two; "
                         f"got shape {x.shape}.")


def _require_subnormals() -> None:
    smallest = np.array([1], np.uint32).view(np.float32)
    if (smallest + np.float32(0)).view(np.uint32)[0] != 1:
        raise FloatingPointError("tree_sum must keep subnormals, but this thread flushes them to zero; "
                                 "call it outside JAX's host callbacks.")
