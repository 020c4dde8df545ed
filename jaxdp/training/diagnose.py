"""Which rank's gradient went bad first. Runs only after a step has failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.leaves import LeafSpec
from jaxdp.models.model import Batch
from jaxdp.training.spmd import first_row
from jaxdp.training.step import StepRules, accumulated_gradients


def nonfinite_origin(rules: StepRules, specs: Sequence[LeafSpec], row: Any, device: jax.Device,
                     batches: Sequence[Batch], step: int, *, parts_per_rank: int) -> str:
    """Says which rank and leaf a non-finite gradient came from, by computing each part's again.

    `row` holds parameters that the step left unchanged.
    """
    program = jax.jit(lambda *arguments: _finite_leaves(rules, *arguments))
    for part, batch in enumerate(batches):
        inputs = jax.device_put({name: np.asarray(x) for name, x in batch.items()}, device)
        total, finite = jax.device_get(program(row, inputs, np.int32(step), np.int32(part)))
        rank = f"rank {part // parts_per_rank}" + (f" (shard {part})" if parts_per_rank > 1 else "")
        if not finite.all():
            return f"{rank} has a non-finite gradient, first in {specs[int(np.argmin(finite))].name!r}"
        if not math.isfinite(total):
            return f"{rank} has a loss of {total}"
    return "every rank's gradient is finite, their sum is not"


def _finite_leaves(rules: StepRules, row: Any, batch: Batch, step: jax.Array,
                   part: jax.Array) -> tuple[jax.Array, jax.Array]:
    stats, grads = accumulated_gradients(rules, first_row(row), batch, step, part)
    return stats[0], jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(grads)])
