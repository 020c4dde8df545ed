"""The first system's ranked data: streams a tiny model learns in a few steps."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from jaxdp.data.corpus import Windows


@dataclasses.dataclass(frozen=True)
class RampCorpus:
    """Window w is `token[i] = (97*w + 13*i + 7) mod vocab_size`, `target = (token + 1) mod vocab_size`.

    Read in order with one sequence a rank, rank r of step 1 gets window r, as in the first system.
    The target is not the stream's next token. There are `vocab_size` windows, all different where
    97 does not divide `vocab_size`.
    """

    vocab_size: int
    name: str = "ramp"
    kind: str = "ramp"

    @property
    def sha256(self) -> str:
        """Of the definition: the data is a function of the vocabulary alone."""
        return hashlib.sha256(f"(97*w + 13*i + 7) mod {self.vocab_size}".encode()).hexdigest()

    def window_count(self, context: int) -> int:
        return self.vocab_size

    def windows(self, indices: np.ndarray, context: int) -> Windows:
        tokens = (97 * np.asarray(indices)[:, None] + 13 * np.arange(context) + 7) % self.vocab_size
        return tokens.astype(np.int32), ((tokens + 1) % self.vocab_size).astype(np.int32)
