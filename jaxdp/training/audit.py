"""The rank audit: are all ranks' parameters the same bits, and if not, where do they part?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.digest import digest_hex, first_difference, leaf_fingerprints
from jaxdp.leaves import LeafSpec, leaf_specs
from jaxdp.training.compilation import Compilation
from jaxdp.training.spmd import RowProgram, first_row

Gather = Callable[[np.ndarray], np.ndarray]  # this process's rows to all ranks' rows


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

    def prepare(self, compilation: Compilation, row: Any) -> None:
        """Compiles what `fingerprints` runs, for parameters like `row`, as part of `compilation`."""
        self._fingerprint.prepare(compilation, None, self._devices, row)

    def fingerprints(self, rows: Sequence[Any]) -> np.ndarray:
        """`uint32[len(rows), leaves, lanes]` of parameters held as rows, on the first devices."""
        dispatched = [self._fingerprint(None, device, row) for row, device in zip(rows, self._devices, strict=False)]
        return np.stack(jax.device_get(dispatched))

    def digest(self, fingerprints: np.ndarray) -> str:
        """The digest of one rank's `uint32[leaves, lanes]`."""
        return digest_hex([spec.name for spec in self.specs], [spec.shape for spec in self.specs],
                          [spec.dtype for spec in self.specs], fingerprints)

    def mismatch(self, rows: Sequence[Any], fingerprints: np.ndarray,
                 gather: Gather = lambda local: local) -> Mismatch | None:
        """The first difference between ranks, or None if all bits agree.

        `fingerprints` are all ranks'; `rows` this process's, which `gather` takes to all ranks only to
        say how far they are apart.
        """
        found = first_difference(fingerprints)
        if found is None:
            return None
        leaf, rank = found
        return Mismatch(self.specs[leaf].name, rank, _maximum_difference(rows, gather))


def _row_fingerprints(row: Any) -> jax.Array:
    return leaf_fingerprints(first_row(row))


def _maximum_difference(rows: Sequence[Any], gather: Gather) -> float:
    """The largest |rank r - rank 0| over all elements, in float64; NaN where only bits of NaNs differ."""
    largest = 0.0
    for leaves in zip(*(jax.tree.leaves(row) for row in rows), strict=True):
        ranks = gather(np.concatenate([np.asarray(leaf) for leaf in leaves])).astype(np.float64)
        if ranks.size:
            largest = np.maximum(largest, np.max(np.abs(ranks - ranks[:1])))
    return float(largest)
