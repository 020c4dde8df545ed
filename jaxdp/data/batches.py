"""Batches for training, addressed by one integer, without state.

The cursor is the number of samples consumed since the start of the run. Sample s is a pure function
of data, seed and s: so a resume is O(1), and no world size changes which samples a run has seen.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxdp.config import check_bool, check_integer
from jaxdp.data.corpus import WindowSource, check_length
from jaxdp.data.permutation import permute

Batch = dict[str, np.ndarray]  # {"inputs": int32[B, T], "targets": int32[B, T]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Batches of `sequences` windows of `context` tokens.

    Sample s belongs to epoch `s // window_count`, which uses every window once: in order, or with
    `shuffle` in an order that depends on `seed` and epoch alone. Raises `DataError` when the data
    holds no window, `ConfigError` for a field that is not allowed.
    """

    corpus: WindowSource
    context: int
    sequences: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_integer("context", self.context, minimum=1)
        check_integer("sequences", self.sequences, minimum=1)
        check_integer("seed", self.seed, minimum=0)
        check_bool("shuffle", self.shuffle)
        check_length(self.corpus, self.context)

    @property
    def window_count(self) -> int:
        """The number of windows, which is the number of samples of an epoch."""
        return self.corpus.window_count(self.context)

    def window_indices(self, cursor: int, count: int) -> np.ndarray:
        """The windows of the samples `[cursor, cursor + count)`: int64[count]."""
        check_integer("cursor", cursor, minimum=0)
        epochs, positions = np.divmod(cursor + np.arange(count), self.window_count)
        if not self.shuffle:
            return positions
        return permute(positions, size=self.window_count, seed=self.seed, epochs=epochs)

    def batch(self, cursor: int) -> Batch:
        """The `sequences` samples from `cursor` on."""
        inputs, targets = self.corpus.windows(self.window_indices(cursor, self.sequences), self.context)
        return {"inputs": inputs, "targets": targets}

    def batches(self, cursor: int, parts: int) -> list[Batch]:
        """The batches of `parts` shards (or ranks): part p starts at sample `cursor + p*sequences`."""
        check_integer("parts", parts, minimum=1)
        return [self.batch(cursor + part * self.sequences) for part in range(parts)]

    def cursor_after(self, cursor: int, parts: int) -> int:
        """The cursor once `batches(cursor, parts)` are used."""
        return cursor + parts * self.sequences

    def global_batch(self, step: int, parts: int) -> list[Batch]:
        """The batches of step `step`, counted from 1, of a run that always had `parts` parts."""
        check_integer("step", step, minimum=1)
        return self.batches((step - 1) * parts * self.sequences, parts)
