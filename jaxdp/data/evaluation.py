"""Batches for evaluation: every sample exactly once, the same metric at every world size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from jaxdp.config import check_integer
from jaxdp.data.batches import Batch
from jaxdp.data.corpus import WindowSource, check_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationBatches:
    """The windows of `corpus` in order, `sequences` a batch; `len()` is the number of batches.

    What a batch holds does not depend on the number of parts that share the work. The last one is
    filled up with rows of targets -1, and a batch past the end has nothing else: its weight is 0,
    so a part without work still takes part. Add the sums of all batches with `mean_loss`. Raises
    `DataError` when the data holds no window, `ConfigError` for a field that is not allowed.
    """

    corpus: WindowSource
    context: int
    sequences: int

    def __post_init__(self) -> None:
        check_integer("context", self.context, minimum=1)
        check_integer("sequences", self.sequences, minimum=1)
        check_length(self.corpus, self.context)

    @property
    def sample_count(self) -> int:
        """The number of samples, each of which is in exactly one batch."""
        return self.corpus.window_count(self.context)

    def __len__(self) -> int:
        return -(-self.sample_count // self.sequences)

    def batch(self, index: int) -> Batch:
        """Batch `index`, counted from 0; past the end one of weight 0."""
        check_integer("index", index, minimum=0)
        first = min(index * self.sequences, self.sample_count)
        indices = np.arange(first, min(first + self.sequences, self.sample_count))
        inputs, targets = self.corpus.windows(indices, self.context)
        padding = ((0, self.sequences - len(indices)), (0, 0))
        return {"inputs": np.pad(inputs, padding), "targets": np.pad(targets, padding, constant_values=-1)}

    def step_count(self, parts: int) -> int:
        """How often `parts` parts must each take a batch until all are done."""
        check_integer("parts", parts, minimum=1)
        return -(-len(self) // parts)

    def batches(self, step: int, parts: int) -> list[Batch]:
        """The batches of step `step` in [0, step_count(parts)): part p gets `step*parts + p`."""
        check_integer("step", step, minimum=0)
        return [self.batch(step * parts + part) for part in range(parts)]


def mean_loss(loss_sums: Iterable[float], weights: Iterable[float]) -> float:
    """The loss a token over all batches: the sum of `loss_sums` over the sum of `weights`.

    Both sums are rounded once (`math.fsum`), so their order and grouping do not matter: ranks that
    hand over their batches in any order get the same bits. NaN when there is no token.
    """
    total_weight = math.fsum(map(float, weights))
    return math.fsum(map(float, loss_sums)) / total_weight if total_weight else math.nan
