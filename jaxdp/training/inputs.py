"""Checks of a step's batches, before anything runs: number, shapes, ids and target counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxdp.data.validate import check_token_ids
from jaxdp.errors import DataError, UnevenInputs
from jaxdp.models.losses import IGNORED_TARGET
from jaxdp.models.model import Batch

_FILL = {"inputs": 0, "targets": IGNORED_TARGET}


def prepare_batches(batches: Sequence[Batch], step: int, *, parts: int, parts_per_rank: int, first_rank: int,
                    vocab_size: int | None) -> list[dict[str, np.ndarray]]:
    """This process's batches as arrays, each of a shape of its own.

    Raises `DataError` naming rank and step: number of batches, shapes, token ids.
    """
    if len(batches) != parts:
        absent = f", none for rank {first_rank + len(batches) // parts_per_rank}" if len(batches) < parts else ""
        raise DataError(f"step {step} needs {parts} batches, one for each {'shard' if parts_per_rank > 1 else 'rank'}; "
                        f"got {len(batches)}{absent}.")
    return [token_arrays(batch, first_rank + part // parts_per_rank, vocab_size, when=f"step {step}")
            for part, batch in enumerate(batches)]


def pad_batches(arrays: Sequence[dict[str, np.ndarray]], shape: tuple[int, int],
                accumulation_steps: int) -> list[Batch]:
    """The batches as int32 arrays of `shape`, padded with ignored targets where shorter.

    `shape` is the largest of all ranks: a part's gradient must come from a program of the same shape
    wherever the part is computed, or its bits would depend on which parts share a process. Raises
    `DataError` if `accumulation_steps` does not divide the sequences.
    """
    if shape[0] % accumulation_steps:
        raise DataError(f"accumulation_steps={accumulation_steps} must divide the sequences of a batch; "
                        f"got {shape[0]}.")
    return [{name: _padded(x, shape, _FILL[name]) for name, x in batch.items()} for batch in arrays]


def target_count(batch: Batch) -> int:
    """The number of targets that count."""
    return int(np.count_nonzero(np.asarray(batch["targets"]) != IGNORED_TARGET))


def token_arrays(batch: Batch | None, rank: int, vocab_size: int | None, *, when: str) -> dict[str, np.ndarray]:
    """`inputs` and `targets` of a batch: integers of one shape, with ids that the vocabulary and int32 hold.

    Raises `DataError` naming the rank and what is wrong.
    """
    arrays = _as_arrays(batch, rank, when)
    if vocab_size is not None:
        check_token_ids([arrays], vocab_size, first_rank=rank)
    limits = np.iinfo(np.int32)
    if any(x.size and (x.min() < limits.min or x.max() > limits.max) for x in arrays.values()):
        raise DataError(f"the batch of rank {rank} has an id that int32 cannot hold.")
    return arrays


def _as_arrays(batch: Batch | None, rank: int, when: str) -> dict[str, np.ndarray]:
    if not isinstance(batch, Mapping):
        raise DataError(f"{when}: rank {rank} has no batch; it needs a mapping of 'inputs' and 'targets', "
                        f"int32[B, T], and got {type(batch).__name__}.")
    missing = {"inputs", "targets"} - set(batch)
    if missing:
        raise DataError(f"the batch of rank {rank} lacks {sorted(missing)}; "
                        "it needs 'inputs' and 'targets', int32[B, T].")
    arrays = {name: np.asarray(batch[name]) for name in ("inputs", "targets")}
    if arrays["inputs"].shape != arrays["targets"].shape or arrays["inputs"].ndim != 2 or any(
            x.dtype.kind not in "iu" for x in arrays.values()):
        described = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in arrays.items())
        raise DataError(f"the batch of rank {rank} must hold two integer arrays of one shape "
                        f"[B, T]; got {described}.")
    return arrays


def check_counts(counts: list[int], parts_per_rank: int, even: bool) -> None:
    if not sum(counts):
        raise DataError("no rank has a target to learn from: every target is -1.")
    # With shards it is shards that are compared, so that what one world size takes no other refuses.
    if even and len(set(counts)) > 1:
        raise UnevenInputs(f"{'shards' if parts_per_rank > 1 else 'ranks'} hold {', '.join(map(str, counts))} target "
                           "tokens and uneven_inputs is 'reject'. Give each as many, or set "
                           "uneven_inputs='token-weighted'.")


def _padded(x: np.ndarray, shape: tuple[int, int], fill: int) -> np.ndarray:
    margins = [(0, full - size) for full, size in zip(shape, x.shape, strict=True)]
    return np.pad(x.astype(np.int32), margins, constant_values=fill)
