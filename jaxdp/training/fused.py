"""The fused step: gradient, buckets, sum and optimizer in one mapped program with donated state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models.model import Batch
from jaxdp.training.reduce import SEPARATE_BUCKETS, PsumReducer, Reducer, sum_gradients
from jaxdp.training.spmd import SpmdProgram, stack, unstack
from jaxdp.training.stages import StepOutcome, Stopwatch, batch_shapes
from jaxdp.training.state import TrainState
from jaxdp.training.step import StepRules, accumulated_gradients, update


class FusedStep:
    """Runs steps over stacked state; one batch a rank."""

    def __init__(self, rules: StepRules, reducer: Reducer, devices: Sequence[jax.Device], rows: list[TrainState], *,
                 first_rank: int = 0) -> None:
        self._devices = devices
        self._ranks = np.arange(first_rank, first_rank + len(devices), dtype=np.int32)
        self._state = stack(rows, devices)
        options = SEPARATE_BUCKETS.get(devices[0].platform) if isinstance(reducer, PsumReducer) else None
        self.program = SpmdProgram(_make_step(rules, reducer), devices, donate=(0,), compiler_options=options)

    @property
    def rows(self) -> list[TrainState]:
        """The state as rows, one a device."""
        return unstack(self._state, self._devices)

    def load(self, rows: list[TrainState]) -> None:
        """Replaces the state."""
        self._state = stack(rows, self._devices)

    def run(self, batches: Sequence[Batch], step: int) -> StepOutcome:
        """One step; one batch for each rank of this process, in rank order."""
        batch = {name: np.stack([np.asarray(part[name]) for part in batches]) for name in batches[0]}
        arguments = (self._state, batch, np.full(len(self._devices), step, np.int32), self._ranks)
        shapes = batch_shapes(batch)
        compile_ms = self.program.prepare(shapes, *arguments)
        watch = Stopwatch()
        self._state, report = self.program(shapes, *arguments)
        report = jax.device_get(unstack(report, self._devices)[0])
        return StepOutcome(report={name: value[0] for name, value in report.items()}, compile_ms=compile_ms,
                           total_ms=watch.lap())


def _make_step(rules: StepRules, reducer: Reducer) -> Any:
    def step_of_rank(state: TrainState, batch: Batch, step: jax.Array, part: jax.Array) -> tuple[TrainState, Any]:
        stats, grads = accumulated_gradients(rules, state.parameters, batch, step, part)
        started = reducer.start()
        gathered = started.gather(stats[None])
        sums = sum_gradients(grads, rules.plan, started)
        new_state, report = update(rules, state, sums, jnp.sum(gathered[:, 1]))
        return new_state, report | {"stats": gathered}

    return step_of_rank
