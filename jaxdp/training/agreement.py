"""Ranks agree on a step's inputs before any of them computes: one refusal refuses for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxdp.errors import BadUse, DataError
from jaxdp.models.model import Batch
from jaxdp.training.inputs import target_count
from jaxdp.training.world import Exchange

_TEXT_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class AgreedInputs:
    """What all ranks know of a step's inputs: target counts by part, and the largest `(B, T)`."""

    counts: list[int]
    shape: tuple[int, int]


def agree_on_inputs(exchange: Exchange, batches: Sequence[Batch], parts: int, refusal: BadUse | None) -> AgreedInputs:
    """Exchanges what ranks must know of each other's batches before they compute.

    `batches` are this process's, `parts` of them, or none where they were refused for `refusal`.
    Raises that, or on the other ranks a `DataError` with the same sentence.
    """
    text = str(refusal).encode()[:_TEXT_BYTES] if refusal is not None else b""
    local = np.zeros((1, 3 + parts), np.int32)
    local[0, 0] = len(text)
    if refusal is None:
        local[0, 1:3] = np.max([batch["inputs"].shape for batch in batches], axis=0)
        local[0, 3:] = [target_count(batch) for batch in batches]
    gathered = exchange.gather(local)
    if gathered[:, 0].any():
        texts = exchange.gather(np.frombuffer(text.ljust(_TEXT_BYTES, b"\0"), np.uint8)[None])
        if refusal is not None:
            raise refusal
        first = int(np.argmax(gathered[:, 0] > 0))
        raise DataError(bytes(texts[first, :gathered[first, 0]]).decode(errors="replace"))
    rows, columns = gathered[:, 1:3].max(axis=0).tolist()
    return AgreedInputs(gathered[:, 3:].reshape(-1).tolist(), (rows, columns))
