"""Refuses a batch that names tokens outside the vocabulary, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.errors import DataError


def check_token_ids(batches: Sequence[Mapping[str, Any]], vocab_size: int, *, first_rank: int = 0) -> None:
    """Raises `DataError` unless each batch is `{"inputs", "targets"}`, integers of one shape `[B, T]`,
    with inputs in [0, vocab_size) and targets in [-1, vocab_size).

    Batch i is that of rank `first_rank + i`. The message names rank, sample, position, id and
    vocabulary of the first offender.
    """
    for rank, batch in enumerate(batches, first_rank):
        inputs, targets = (_integers(batch, field, rank) for field in ("inputs", "targets"))
        if inputs.shape != targets.shape or inputs.ndim != 2:
            raise DataError(f"rank {rank} has inputs of shape {inputs.shape} and targets of shape {targets.shape}; "
                            "both must have one shape (sequences, tokens).")
        _check_range("inputs", inputs, 0, vocab_size, rank)
        _check_range("targets", targets, -1, vocab_size, rank)


def _integers(batch: Mapping[str, Any], field: str, rank: int) -> np.ndarray:
    if field not in batch:
        raise DataError(f"rank {rank} has a batch without {field!r}; it holds {sorted(batch)}.")
    values = np.asarray(batch[field])
    if not np.issubdtype(values.dtype, np.integer):
        raise DataError(f"rank {rank} has {field} of dtype {values.dtype}; token ids must be integers.")
    return values


def _check_range(field: str, ids: np.ndarray, minimum: int, vocab_size: int, rank: int) -> None:
    if ids.size == 0 or (ids.min() >= minimum and ids.max() < vocab_size):
        return
    sample, position = map(int, np.argwhere((ids < minimum) | (ids >= vocab_size))[0])
    ignored = " (or -1, which is ignored)" if minimum < 0 else ""
    raise DataError(f"rank {rank}, sample {sample}, position {position}: {field} has token id "
                    f"{int(ids[sample, position])}, outside the vocabulary of {vocab_size}. "
                    f"Ids must be from 0 to {vocab_size - 1}{ignored}.")
