"""Ranks agree on a step's inputs before any of them computes: one refusal refuses for all."""

from __future__ import annotations

import numpy as np

from jaxdp.errors import BadUse, DataError
from jaxdp.training.world import Exchange

_TEXT_BYTES = 1024


def agree_on_inputs(exchange: Exchange, counts: list[int], parts: int, refusal: BadUse | None) -> list[int]:
    """The target counts of all ranks' parts, in order.

    `counts` are this process's, one for each of its `parts`; `refusal` is what its batches were
    refused for. Raises that, or on the other ranks a `DataError` with the same sentence.
    """
    text = str(refusal).encode()[:_TEXT_BYTES] if refusal is not None else b""
    local = np.zeros((1, parts + 1), np.int32)
    local[0, 0] = len(text)
    local[0, 1:] = counts if refusal is None else 0
    gathered = exchange.gather(local)
    if gathered[:, 0].any():
        padded = np.frombuffer(text.ljust(_TEXT_BYTES, b"\0"), np.uint8)[None]
        texts = exchange.gather(padded)
        first = int(np.argmax(gathered[:, 0] > 0))
        if refusal is not None:
            raise refusal
        raise DataError(bytes(texts[first, :gathered[first, 0]]).decode(errors="replace"))
    return gathered[:, 1:].reshape(-1).tolist()
