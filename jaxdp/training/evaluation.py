"""The loss without dropout and without update, the same at every world size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models.model import Batch
from jaxdp.training.inputs import token_arrays
from jaxdp.training.spmd import RowProgram, first_row
from jaxdp.training.stages import batch_shapes
from jaxdp.training.step import StepRules, loss_sum


class Evaluator:
    """Evaluates batches one device each; a batch's result does not depend on the others."""

    def __init__(self, rules: StepRules) -> None:
        self._vocab_size = rules.model.vocab_size
        self._program = RowProgram(lambda row, batch: jnp.stack(loss_sum(rules, first_row(row), batch, None)))

    def run(self, rows: Sequence[Any], devices: Sequence[jax.Device], batches: Sequence[Batch]) -> tuple[float, int]:
        """`(loss_sum, tokens)`: batch i runs on rank i mod W; sums are exact, in batch order.

        Raises `DataError` for a batch that a step would refuse.
        """
        results = []
        for index, batch in enumerate(batches):
            rank = index % len(devices)
            arrays = token_arrays(batch, rank, self._vocab_size, when="evaluation")
            inputs = {name: x.astype(np.int32) for name, x in arrays.items()}  # copies: the caller may refill its own
            placed = jax.device_put(inputs, devices[rank])
            results.append(self._program(batch_shapes(inputs), devices[rank], rows[rank], placed))
        stats = np.array(jax.device_get(results), np.float64).reshape(-1, 2)
        return math.fsum(stats[:, 0]), int(stats[:, 1].sum())
