"""Where two states or two sequences of records first differ. Pure: no files, no output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

COMPARED = ("loss", "gradient_digest", "parameter_digest")  # what a step's numbers come to


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """The first tensor that differs, and there the first element (None when name, shape or dtype differ)."""

    name: str
    reason: str
    index: tuple[int, ...] | None = None


def first_tensor_difference(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> TensorDifference | None:
    """Compares bits in the order of `left`: NaNs are equal only if their bits are, and -0 is not 0."""
    for name, tensor in left.items():
        if name not in right:
            return TensorDifference(name, "only the first has it")
        if difference := _difference(name, tensor, right[name]):
            return difference
    extra = next((name for name in right if name not in left), None)
    return None if extra is None else TensorDifference(extra, "only the second has it")


def record_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """What of a step's numbers differs between two metrics records, with both values; empty where nothing does.

    Where the losses differ and both runs had as many ranks, the first rank whose loss differs is
    named too.
    """
    found = [f"{name} {left[name]} and {right[name]}" for name in COMPARED if left[name] != right[name]]
    ranks = list(zip(left["rank_losses"], right["rank_losses"], strict=False))
    if found and len(left["rank_losses"]) == len(right["rank_losses"]):
        found += [f"loss of rank {rank} {one} and {other}"
                  for rank, (one, other) in enumerate(ranks) if one != other][:1]
    return found


def _difference(name: str, left: np.ndarray, right: np.ndarray) -> TensorDifference | None:
    if left.dtype != right.dtype or left.shape != right.shape:
        return TensorDifference(name, f"{left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}")
    differs = np.flatnonzero(_bits(left) != _bits(right))
    if len(differs) == 0:
        return None
    place = int(differs[0])
    index = tuple(int(i) for i in np.unravel_index(place, left.shape))
    one, other = (_describe(tensor, place) for tensor in (left, right))
    return TensorDifference(name, f"{len(differs)} of {left.size} elements, the first {one} and {other}", index)


def _bits(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor).reshape(-1).view(f"u{tensor.dtype.itemsize}")


def _describe(tensor: np.ndarray, place: int) -> str:
    digits = 2 * tensor.dtype.itemsize
    value = tensor.reshape(-1)[place]
    return f"0x{int(_bits(tensor)[place]):0{digits}X} ({int(value) if tensor.dtype.kind in 'biu' else float(value)})"
