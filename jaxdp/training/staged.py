"""The staged step: gradient, communication and optimizer as programs of their own.

Gradients and the optimizer run as plain `jit` programs, one device at a time, whose text knows
nothing of the world; only the sum crosses devices. So a shard's gradient has the same bits at every
world size, and the stages can be timed apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.collectives.operations import tree_sum_many
from jaxdp.models.model import Batch
from jaxdp.training.compilation import Compilation
from jaxdp.training.reduce import SEPARATE_BUCKETS, PsumReducer, Reducer, sum_gradients
from jaxdp.training.shards import SiblingTree
from jaxdp.training.spmd import RowProgram, SpmdProgram, as_row, first_row, on_device, stack, stacked_shapes, unstack
from jaxdp.training.stages import StepOutcome, Stopwatch, batch_shapes
from jaxdp.training.state import TrainState
from jaxdp.training.step import StepRules, microbatch_gradients, update
from jaxdp.tree import tree_sum

Prepare = Callable[[Compilation, Any], object]


class StagedStep:
    """Runs steps over rows of state; `parts_per_rank` batches a rank, a power of two."""

    def __init__(self, rules: StepRules, reducer: Reducer, devices: Sequence[jax.Device], rows: list[TrainState], *,
                 parts_per_rank: int, first_part: int = 0, prepare_also: Prepare | None = None) -> None:
        """`prepare_also(compilation, row of parameters)` compiles what follows every step, along with the step."""
        self._rules = rules
        self._prepare_also = prepare_also or (lambda compilation, parameters: None)
        self._devices = devices
        self._parts_per_rank = parts_per_rank
        self._first_part = first_part
        self.rows = rows
        options = SEPARATE_BUCKETS.get(devices[0].platform) if isinstance(reducer, PsumReducer) else None
        self._gradient = RowProgram(_make_gradient(rules))
        self._add = RowProgram(_add_rows)
        self._update = RowProgram(_make_update(rules), donate=(0,))
        self.program = SpmdProgram(_make_reduce(rules, reducer), devices, donate=(0,), compiler_options=options)
        self._warm: set[Any] = set()

    def load(self, rows: list[TrainState]) -> None:
        """Replaces the state."""
        self.rows = rows

    def run(self, batches: Sequence[Batch], step: int) -> StepOutcome:
        """One step; rank r's parts are `batches[r * parts_per_rank:(r + 1) * parts_per_rank]`."""
        compile_ms = self._warm_up(batches)
        watch = Stopwatch()
        gradients, stats = self._gradients(batches, step)
        jax.block_until_ready(gradients)
        forward_backward_ms = watch.lap()
        sums, gathered = self._reduce(gradients, stats)
        jax.block_until_ready(sums)
        communication_ms = watch.lap()
        report = self._apply(sums, gathered)
        optimizer_ms = watch.lap()
        return StepOutcome(report | {"stats": gathered}, compile_ms,
                           forward_backward_ms + communication_ms + optimizer_ms,
                           forward_backward_ms, communication_ms, optimizer_ms)

    def _gradients(self, batches: Sequence[Batch], step: int) -> tuple[list[Any], list[Any]]:
        """Each rank's subtree of gradients, and its parts' stats, as rows."""
        trees = [SiblingTree(functools.partial(self._add, "shard", device)) for device in self._devices]
        stats: list[list[Any]] = [[] for _ in self._devices]
        for local in range(self._parts_per_rank):
            for rank in range(len(self._devices)):
                part = rank * self._parts_per_rank + local
                part_stats, grads = self._part_gradient(rank, batches[part], step, self._first_part + part)
                stats[rank].append(part_stats)
                trees[rank].push(grads)
        return [tree.root() for tree in trees], stats

    def _part_gradient(self, rank: int, batch: Batch, step: int, part: int) -> tuple[Any, Any]:
        """One part's stats and gradients: its microbatches one by one, added from memory."""
        count = self._rules.accumulation_steps
        device = self._devices[rank]
        pieces = {name: np.split(np.asarray(x), count) for name, x in batch.items()}
        total: Any = None
        for index in range(count):
            inputs = jax.device_put({name: piece[index] for name, piece in pieces.items()}, device)
            result = self._gradient(batch_shapes(inputs), device, self.rows[rank].parameters, inputs, np.int32(step),
                                    np.int32(part), np.int32(index))
            total = result if total is None else self._add("microbatch", device, total, result)
        return total

    def _reduce(self, gradients: list[Any], stats: list[Any]) -> tuple[list[Any], np.ndarray]:
        arguments = (stack(gradients, self._devices), stack(stats, self._devices))
        sums, gathered = self.program(None, *arguments)
        return unstack(sums, self._devices), np.asarray(unstack(gathered, self._devices)[0])[0]

    def _apply(self, sums: list[Any], gathered: np.ndarray) -> dict[str, Any]:
        weight = total_weight(gathered)
        reports: list[Any] = []
        for rank in range(len(self._devices)):
            self.rows[rank], report = self._update(None, self._devices[rank], self.rows[rank], sums[rank], weight)
            reports.append(report)
        jax.block_until_ready(self.rows)
        return jax.device_get(reports[0])

    def _warm_up(self, batches: Sequence[Batch]) -> float:
        """Compiles what no earlier batches needed, from shapes alone; milliseconds spent."""
        new = {shapes: batch for batch in batches if (shapes := batch_shapes(batch)) not in self._warm}
        if not new:
            return 0.0
        watch = Stopwatch()
        with Compilation(self._devices) as compilation:
            results = [self._prepare_gradient(compilation, batch) for batch in new.values()]
            if not self._warm:
                self._prepare_rest(compilation, *results[0])
        self._warm.update(new)
        return watch.lap()

    def _prepare_gradient(self, compilation: Compilation, batch: Batch) -> tuple[Any, Any]:
        """The shapes of one part's stats and gradients."""
        piece = {name: np.split(np.asarray(x), self._rules.accumulation_steps)[0] for name, x in batch.items()}
        inputs = on_device(piece, self._devices[0])
        return self._gradient.prepare(compilation, batch_shapes(piece), self._devices, self.rows[0].parameters, inputs,
                                      *np.zeros(3, np.int32))

    def _prepare_rest(self, compilation: Compilation, stats: Any, gradients: Any) -> None:
        """The programs that no batch's shape changes, those that take longest first."""
        self._update.prepare(compilation, None, self._devices, self.rows[0], gradients, np.float32(1))
        self._prepare_also(compilation, self.rows[0].parameters)
        if self._parts_per_rank > 1:
            self._add.prepare(compilation, "shard", self._devices, gradients, gradients)
        if self._rules.accumulation_steps > 1:
            part = (stats, gradients)
            self._add.prepare(compilation, "microbatch", self._devices, part, part)
        self.program.prepare(None, stacked_shapes(gradients, self._devices),
                             stacked_shapes([stats] * self._parts_per_rank, self._devices))


def total_weight(stats: np.ndarray) -> np.float32:
    """`T` over the parts' weights, as NumPy computes it: no compiler, no world size."""
    return tree_sum(np.asarray(stats, np.float32)[:, 1:])[0]


def _make_gradient(rules: StepRules) -> Any:
    def gradient(parameters: Any, batch: Batch, step: jax.Array, part: jax.Array, microbatch: jax.Array) -> Any:
        return as_row(microbatch_gradients(rules, first_row(parameters), batch, step, part, microbatch))

    return gradient


def _add_rows(left: Any, right: Any) -> Any:
    """Left sibling + right sibling, one IEEE add an element, from memory."""
    structure = jax.tree.structure(left)
    return structure.unflatten(tree_sum_many([jax.tree.leaves(left), jax.tree.leaves(right)]))


def _make_reduce(rules: StepRules, reducer: Reducer) -> Any:
    def reduce(gradients: Any, stats: list[jax.Array]) -> tuple[Any, jax.Array]:
        started = reducer.start()
        return sum_gradients(gradients, rules.plan, started), started.gather(jnp.stack(stats))

    return reduce


def _make_update(rules: StepRules) -> Any:
    def apply(state: TrainState, sums: Any, weight: jax.Array) -> tuple[TrainState, Any]:
        new_state, report = update(rules, first_row(state), first_row(sums), weight)
        return as_row(new_state), report

    return apply
