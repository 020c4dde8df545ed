"""The rank audit: are all ranks' parameters the same bits, and if not, where do they part?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.digest import digest_hex, first_difference, leaf_fingerprints
from jaxdp.leaves import LeafSpec, leaf_specs
from jaxdp.training.spmd import RowProgram, first_row


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The first leaf whose bits differ between ranks, the first rank that differs from rank 0 there."""

    leaf: str
    rank: int
    maximum_difference: float


class Auditor:
    """Compares parameters on device by fingerprint; reads them back only where they differ."""

    def __init__(self, parameters: Any, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self.specs: tuple[LeafSpec, ...] = leaf_specs(parameters)
        self._fingerprint = RowProgram(_row_fingerprints)

    def fingerprints(self, rows: Sequence[Any]) -> np.ndarray:
        """`uint32[len(rows), leaves, lanes]` of parameters held as rows, on the first devices."""
        dispatched = [self._fingerprint(None, device, row) for row, device in zip(rows, self._devices, strict=False)]
        return np.stack(jax.device_get(dispatched))

    def digest(self, fingerprints: np.ndarray) -> str:
        """The digest of one rank's `uint32[leaves, lanes]`."""
        return digest_hex([spec.name for spec in self.specs], [spec.shape for spec in self.specs],
                          [spec.dtype for spec in self.specs], fingerprints)

    def mismatch(self, rows: Sequence[Any], fingerprints: np.ndarray) -> Mismatch | None:
        """The first difference between rows, or None if all bits agree."""
        found = first_difference(fingerprints)
        if found is None:
            return None
        leaf, rank = found
        return Mismatch(self.specs[leaf].name, rank, _maximum_difference(rows))


def _row_fingerprints(row: Any) -> jax.Array:
    return leaf_fingerprints(first_row(row))


def _maximum_difference(rows: Sequence[Any]) -> float:
    """The largest |rank r - rank 0| over all elements, in float64; NaN where only bits of NaNs differ."""
    largest = 0.0
    host = [[np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(row)] for row in rows]
    for row in host[1:]:
        for leaf, reference in zip(row, host[0], strict=True):
            if leaf.size:
                largest = np.maximum(largest, np.max(np.abs(leaf - reference)))
    return float(largest)
