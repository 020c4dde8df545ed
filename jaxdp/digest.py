"""Digests of a tree's bits, the same for every world size, layout, backend and bucket plan.

Each leaf has a fingerprint of two 32-bit lanes, a sum (mod 2^32, so any order of reduction gives
the same value) over its elements of a nonlinear mix of bits and row-major position:

    a = scramble(word ^ position * K1)        b = xorshift16((a ^ position * K2) * C3)

`scramble` is the xorshift-multiply finaliser "lowbias32" (C. Wellons, hash-prospector, 2018), a
bijection, and so is the step from a to b: an element that alone changes always changes both lanes.
The nonlinearity matters: under a multilinear hash two flipped signs cancel. Elements of 1 or 2
bytes are widened; an element of 8 bytes counts as two words, low word first. A leaf's name, shape
and dtype join the fingerprint on the host (`digest_hex`).

It finds faults and differences; it is no defence against an adversary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.leaves import leaf_specs

LANES = 2

_K1, _K2, _C3 = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77), np.uint32(0xC2B2AE3D)
_C1, _C2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_CHUNK = 1 << 16  # words that the host mixes at a time, to stay in cache


def leaf_fingerprints(tree: Any) -> jax.Array:
    """`uint32[leaf_count, LANES]` of a tree of arrays, in canonical order; for use inside `jit` or `pmap`.

    One pass over each leaf. Raises `TypeError` for dtypes other than bool, integers and floats of
    1, 2, 4 or 8 bytes.
    """
    lanes = [_lanes(_words(leaf)) for leaf in jax.tree_util.tree_leaves(tree)]
    return jnp.stack(lanes) if lanes else jnp.zeros((0, LANES), jnp.uint32)


def _words(leaf: Any) -> jax.Array:
    """The bits of `leaf` as `uint32[n]` in row-major order."""
    # The barrier keeps a compiler from computing the leaf a second time, with other rounding, here.
    leaf = lax.optimization_barrier(jnp.asarray(leaf))
    word = _word_dtype(leaf.dtype)
    bits = leaf if leaf.dtype == bool else lax.bitcast_convert_type(leaf, word)
    return bits.astype(jnp.uint32).reshape(-1)


def _lanes(words: jax.Array) -> jax.Array:
    position = lax.iota(jnp.uint32, words.size)
    a = words ^ (position * _K1)
    a = (a ^ (a >> 16)) * _C1
    a = (a ^ (a >> 15)) * _C2
    a = a ^ (a >> 16)
    b = (a ^ (position * _K2)) * _C3
    b = b ^ (b >> 16)
    zero = np.uint32(0)
    # Both sums in one reduction: XLA:CPU vectorises this form, and a plain sum per lane not.
    return jnp.stack(lax.reduce((a, b), (zero, zero), lambda x, y: (x[0] + y[0], x[1] + y[1]), (0,)))


def fingerprints_numpy(tree: Any) -> np.ndarray:
    """What `leaf_fingerprints` gives, computed by NumPy from arrays in host memory."""
    lanes = [_numpy_lanes(_numpy_words(np.asarray(leaf))) for leaf in jax.tree_util.tree_leaves(tree)]
    return np.array(lanes, np.uint32).reshape(-1, LANES)


def _numpy_words(leaf: np.ndarray) -> np.ndarray:
    """The bits of `leaf` as unsigned integers in row-major order, not yet widened."""
    word = _word_dtype(leaf.dtype)
    return np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).reshape(-1).view(word)


def _numpy_lanes(words: np.ndarray) -> tuple[int, int]:
    first, second = 0, 0
    for start in range(0, words.size, _CHUNK):
        mixed = words[start:start + _CHUNK].astype(np.uint32)
        position = np.arange(start, start + mixed.size).astype(np.uint32)
        mixed ^= position * _K1
        for shift, multiplier in ((16, _C1), (15, _C2), (16, None)):
            mixed ^= mixed >> shift
            if multiplier is not None:
                mixed *= multiplier
        first += int(mixed.sum(dtype=np.uint64))
        mixed ^= position * _K2
        mixed *= _C3
        mixed ^= mixed >> 16
        second += int(mixed.sum(dtype=np.uint64))
    return first % 2**32, second % 2**32


def _word_dtype(dtype: Any) -> np.dtype[Any]:
    """The unsigned integer through which the bits of `dtype` are read."""
    words = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
    if not _fills_its_bytes(dtype) or dtype.itemsize not in words:
        raise TypeError(f"a digest takes bool, integers and floats of 1, 2, 4 or 8 bytes; got {dtype}.")
    return np.dtype(words[dtype.itemsize])


def _fills_its_bytes(dtype: Any) -> bool:
    """Whether `dtype` is real and uses every bit of its storage, as int4, say, does not."""
    if jnp.issubdtype(dtype, np.floating):
        return jnp.finfo(dtype).bits == 8 * dtype.itemsize
    return isinstance(dtype, np.dtype) and dtype.kind in "biu"


def digest_hex(names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[Any],
               fingerprints: Any) -> str:
    """The digest, 64 hex digits, of leaves with these names, shapes, dtypes and `fingerprints[n, LANES]`.

    SHA-256 of one JSON line `[name, dtype, shape, lanes]` a leaf, sorted by name, so that the order
    in which the leaves are listed does not matter. Raises `ValueError` where lengths differ or a
    name is used twice.
    """
    lanes = np.asarray(fingerprints, np.uint32)
    if lanes.shape != (len(names), LANES) or len(set(names)) != len(names):
        raise ValueError(f"digest_hex needs fingerprints of shape ({len(set(names))}, {LANES}), one row for "
                         f"each distinct name; got shape {lanes.shape} for {len(names)} names.")
    rows = zip(names, (np.dtype(dtype).name for dtype in dtypes), ([int(n) for n in shape] for shape in shapes),
               lanes.tolist(), strict=True)
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in sorted(rows, key=lambda row: row[0])]
    return hashlib.sha256("".join(lines).encode("ascii")).hexdigest()


def tree_digest(tree: Any) -> str:
    """`digest_hex` of a tree of arrays: on device where every leaf is a `jax.Array`, else by NumPy."""
    specs = leaf_specs(tree)
    on_device = all(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(tree))
    fingerprints = _fingerprints_on_device(tree) if on_device else fingerprints_numpy(tree)
    return digest_hex([leaf.name for leaf in specs], [leaf.shape for leaf in specs],
                      [leaf.dtype for leaf in specs], fingerprints)


_fingerprints_on_device = jax.jit(leaf_fingerprints)


def first_difference(fingerprints: Any) -> tuple[int, int] | None:
    """The first leaf, and there the first rank, whose fingerprint is not rank 0's; None if all agree.

    `fingerprints` is `uint32[world_size, leaf_count, LANES]`; the answer is `(leaf_index, rank)`.
    """
    lanes = np.asarray(fingerprints)
    differs = (lanes != lanes[:1]).any(axis=2)  # [rank, leaf]
    found = np.argwhere(differs.T)
    return (int(found[0][0]), int(found[0][1])) if len(found) else None
