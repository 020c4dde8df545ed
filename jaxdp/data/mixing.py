"""A keyed hash on arrays: the same numbers on every platform and NumPy release."""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of splitmix64


def mix(*words: np.ndarray | int) -> np.ndarray:
    """Hashes the words, broadcast against each other, to uint64 values.

    Each word is taken modulo 2^64, added to the state with splitmix64's increment and passed
    through its finalizer (Steele, Lea and Flood 2014; constants of Stafford's variant 13).
    """
    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for word in words:
            state = _finalize(state + np.uint64(_GOLDEN) + _to_uint64(word))
    return np.asarray(state)


def _to_uint64(word: np.ndarray | int) -> np.ndarray:
    return np.asarray(word % (1 << 64) if isinstance(word, int) else word).astype(np.uint64)


def _finalize(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
