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
from jaxdp.training.world import Exchange

_FINITE, _LOSS = -1, -2  # codes of a part besides the index of its first leaf that is not finite


def nonfinite_origin(rules: StepRules, specs: Sequence[LeafSpec], row: Any, device: jax.Device,
                     batches: Sequence[Batch], step: int, first_rank: int, exchange: Exchange, *,
                     parts_per_rank: int) -> str:
    """Says which rank and leaf a non-finite gradient came from, by computing each part's again.

    `row` holds parameters that the step left unchanged. Every rank calls it.
    """
    program = jax.jit(lambda *arguments: _finite_leaves(rules, *arguments))
    first_part = first_rank * parts_per_rank
    codes = []
    for part, batch in enumerate(batches, first_part):
        inputs = jax.device_put({name: np.asarray(x) for name, x in batch.items()}, device)
        total, finite = jax.device_get(program(row, inputs, np.int32(step), np.int32(part)))
        code = _FINITE if math.isfinite(total) else _LOSS
        codes.append(code if finite.all() else int(np.argmin(finite)))
    return _describe(exchange.gather(np.array(codes, np.int32)).tolist(), specs, parts_per_rank)


def _describe(codes: Sequence[int], specs: Sequence[LeafSpec], parts_per_rank: int) -> str:
    for part, code in enumerate(codes):
        rank = f"rank {part // parts_per_rank}" + (f" (shard {part})" if parts_per_rank > 1 else "")
        if code >= 0:
            return f"{rank} has a non-finite gradient, first in {specs[code].name!r}"
        if code == _LOSS:
            return f"{rank} has a loss that is not finite"
    return "every rank's gradient is finite, their sum is not"


def _finite_leaves(rules: StepRules, row: Any, batch: Batch, step: jax.Array,
                   part: jax.Array) -> tuple[jax.Array, jax.Array]:
    stats, grads = accumulated_gradients(rules, first_row(row), batch, step, part)
    return stats[0], jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(grads)])
