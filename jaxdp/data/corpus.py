"""What training data is: a stream of tokens, read in windows of one context."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from jaxdp.errors import DataError

Windows = tuple[np.ndarray, np.ndarray]  # inputs and targets, int32[N, context]


class WindowSource(Protocol):
    """Data that can be read by window index."""

    @property
    def name(self) -> str: ...  # what messages call it

    @property
    def kind(self) -> str: ...  # "text", "tokens", "kjv", "synthetic" or "ramp"

    @property
    def sha256(self) -> str: ...  # of the file, or of the generated data

    def window_count(self, context: int) -> int:
        """The number of windows of `context` tokens."""
        ...

    def windows(self, indices: np.ndarray, context: int) -> Windows:
        """The inputs and targets of the windows `indices`, int[N]: int32[N, context] each."""
        ...


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A stream of tokens: uint8, uint16 or int32 `[L]`, possibly memory-mapped.

    Window w holds the tokens [w*context, (w+1)*context); its targets are the same places one token
    on. The tail that does not fill a window with its last target is left out.
    """

    name: str
    tokens: np.ndarray
    sha256: str
    kind: str

    def window_count(self, context: int) -> int:
        return max(0, len(self.tokens) - 1) // context

    def windows(self, indices: np.ndarray, context: int) -> Windows:
        places = np.asarray(indices)[:, None] * context + np.arange(context + 1)
        tokens = self.tokens[places].astype(np.int32)
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def check_length(source: WindowSource, context: int) -> None:
    """Raises `DataError` naming both numbers unless there is a window of `context` tokens."""
    if source.window_count(context) == 0:
        held = f"{len(source.tokens)} tokens" if isinstance(source, Corpus) else "no window"
        raise DataError(f"data {source.name!r} holds {held} and one context of {context} tokens needs "
                        f"{context + 1}, the last target included. Give more data or a shorter context.")


def split(source: WindowSource, *, context: int,
          validation_fraction: float = 0.05) -> tuple[WindowSource, WindowSource | None]:
    """Training and validation data: the last `validation_fraction` of the tokens is held out.

    The held-out part is made at least one window; there is none (None) if training would be left
    without one. The two share no target. The ramp has no held-out part: both get all of it.
    """
    if not isinstance(source, Corpus):
        return source, source
    held_out = max(round(len(source.tokens) * validation_fraction), context + 1)
    if len(source.tokens) - held_out < context + 1:
        return source, None
    train, validation = source.tokens[:-held_out], source.tokens[-held_out:]
    return dataclasses.replace(source, tokens=train), dataclasses.replace(source, tokens=validation)
