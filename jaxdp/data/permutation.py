"""A shuffle without state: where an index goes is computed, not stored."""

from __future__ import annotations

import numpy as np

from jaxdp.data.mixing import mix

_ROUNDS = 6  # four already pass for random (Luby and Rackoff 1988); two more for domains of a few bits


def permute(indices: np.ndarray, *, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Images of `indices`, int[N] in [0, size), under the permutation of each one's epoch, int[N].

    For one seed and epoch this is a bijection of [0, size). A Feistel network permutes the next
    power of four; what falls outside is sent through again until it falls inside (cycle walking),
    on average less than four times. Returns int64[N].
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    images = np.array(indices, np.uint64)
    epochs = np.asarray(epochs)
    outside = np.ones(images.shape, bool)
    while outside.any():
        images[outside] = _feistel(images[outside], half_bits, seed, epochs[outside])
        outside = images >= size
    return images.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """A permutation of [0, 4^half_bits): each round is undone by running it backwards."""
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for round_index in range(_ROUNDS):
        left, right = right, left ^ (mix(seed, epochs, round_index, right) & mask)
    return (left << shift) | right
