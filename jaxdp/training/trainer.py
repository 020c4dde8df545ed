"""`DataParallelTrainer`: one model, its optimizer, and steps over devices that agree to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxdp.buckets import BucketPlan, plan_buckets
from jaxdp.collectives import Capabilities, DeterministicCollective, create_deterministic_collective, native
from jaxdp.collectives.failures import named_failures
from jaxdp.config import DataParallelConfig
from jaxdp.errors import BadUse, CommunicatorClosed, ConfigError, NonFiniteGradient, ParameterMismatch
from jaxdp.models.model import Batch, Model
from jaxdp.training.agreement import agree_on_inputs
from jaxdp.training.audit import Auditor, Mismatch
from jaxdp.training.diagnose import nonfinite_origin
from jaxdp.training.evaluation import Evaluator
from jaxdp.training.fused import FusedStep
from jaxdp.training.inputs import check_counts, pad_batches, prepare_batches
from jaxdp.training.metrics import StepMetrics
from jaxdp.training.optimizer import make_optimizer
from jaxdp.training.reduce import PsumReducer, Reducer, TreeReducer
from jaxdp.training.spmd import AXIS, replicate
from jaxdp.training.staged import StagedStep
from jaxdp.training.stages import StepOutcome, Stopwatch
from jaxdp.training.state import TrainState, initial_state, state_from_tensors, state_tensors
from jaxdp.training.step import StepRules
from jaxdp.training.world import Exchange, make_world
from jaxdp.tree import tree_sum


class DataParallelTrainer:
    """Trains `model` data-parallel over local devices.

    Every rank holds the same parameters and optimizer state, reads its own batch, and applies the
    same update, made of gradients of the summed loss, summed over ranks and divided once by the
    summed number of target tokens. With `config.shards` the bits do not depend on the world size.

    Raises `ConfigError` for a device that is not there, a compute dtype that the model does not
    offer, or a parameter that is not a float of at most 32 bits. Use it as a context manager, or
    call `close()`.
    """

    def __init__(self, model: Model, seed: int, config: DataParallelConfig) -> None:
        self.config = config
        self._closed = False
        self.model = _with_compute_dtype(model, config.compute_dtype)
        self.world = make_world(config)
        self.devices = self.world.devices
        optimizer = make_optimizer(config.optimizer)
        state, dtypes = initial_state(self.model, optimizer, seed, self.devices[0])
        limit = 1 if config.reducer == "per-parameter" else config.maximum_bucket_bytes
        self.plan: BucketPlan = plan_buckets(state.parameters, limit)
        self._host_state = jax.eval_shape(lambda: state)
        self._rules = StepRules(
            model=self.model, optimizer=optimizer, plan=self.plan, forward_dtypes=dtypes,
            key_data=np.asarray(jax.random.key_data(jax.random.key(seed))),
            accumulation_steps=config.accumulation_steps, maximum_gradient_norm=config.maximum_gradient_norm)
        self._auditor = Auditor(state.parameters, self.devices)
        self._evaluator = Evaluator(self._rules)
        self._collective = self._make_collective()
        self._exchange = Exchange(self.world, self._collective)
        self._step = self._make_step(self._make_reducer(), replicate(state, self.devices))

    @property
    def world_size(self) -> int:
        """The number of ranks, of all processes."""
        return self.world.size

    @property
    def parts(self) -> int:
        """The number of batches of one step over all ranks: shards, or the world size."""
        return self.config.shards or self.world_size

    @property
    def local_parts(self) -> int:
        """The number of batches that `step` takes in this process."""
        return self.parts_per_rank * len(self.devices)

    @property
    def parts_per_rank(self) -> int:
        """The number of shards of one rank, 1 without shards."""
        return self.parts // self.world_size

    @property
    def capabilities(self) -> Capabilities | None:
        """Of the communicator; None for the psum reducer, which has none."""
        return None if self._collective is None else self._collective.capabilities

    def step(self, batches: Sequence[Batch], step: int) -> StepMetrics:
        """Does the `step`-th update (counted from 1) with one batch a rank, or one a shard.

        Raises:
            DataError, UnevenInputs: the batches cannot be used; nothing has changed.
            NonFiniteGradient: with `on_nonfinite="raise"`; parameters, moments and count are unchanged.
            ParameterMismatch: the audit found ranks that differ.
            CollectiveError: a peer did not come, failed, or made another call, or the trainer is closed.
            The errors of the last three kinds that follow a finished step carry it as `.metrics`.
        """
        config = self.config
        self._raise_if_closed()
        batches = self._agreed_batches(batches, step)
        with named_failures():
            outcome = self._step.run(batches, step)
        watch = Stopwatch()
        checked = config.parameter_check_interval > 0 and step % config.parameter_check_interval == 0
        rows = [row.parameters for row in self._step.rows]
        fingerprints = self._auditor.fingerprints(rows if checked else rows[:1])
        digest = self._auditor.digest(fingerprints[0])
        gather = self._exchange.gather
        mismatch = self._auditor.mismatch(rows, gather(fingerprints), gather) if checked else None
        metrics = self._metrics(step, outcome, checked=checked, mismatch=mismatch, digest=digest,
                                verification_ms=watch.lap())
        self._raise_for(metrics, mismatch, batches)
        return metrics

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """`(loss_sum, tokens)` over any number of batches, without dropout, spread over the ranks.

        Each batch's loss is a function of the batch alone and they are added in order, so the result
        is the same at every world size.
        """
        return self._evaluator.run([row.parameters for row in self._step.rows], self.devices, batches)

    def parameters(self) -> Any:
        """The parameters as a pytree of host arrays (rank 0's)."""
        return self._host_rows().parameters

    def parameter_digest(self) -> str:
        """The digest of the parameters as they are now (rank 0's)."""
        return self._auditor.digest(self._auditor.fingerprints([self._step.rows[0].parameters])[0])

    def state_tensors(self) -> dict[str, np.ndarray]:
        """Host copies of all that the next step depends on, by name (rank 0's)."""
        return state_tensors(self._host_rows())

    def load_state_tensors(self, tensors: Mapping[str, np.ndarray], step: int) -> None:
        """Replaces the state on every rank by `tensors`, the state after `step`.

        Raises `CheckpointError` naming the first tensor that does not fit.
        """
        del step  # the step is an argument of each call
        self._step.load(replicate(state_from_tensors(tensors, self._host_state), self.devices))

    def compiled_text(self) -> list[str]:
        """The optimized HLO of the program that holds the collectives, once a step has run."""
        return self._step.program.compiled_text()

    def close(self) -> None:
        """Closes the communicator; idempotent. The state can still be read, evaluated and saved."""
        self._closed = True
        if self._collective is not None:
            self._collective.close()

    def __enter__(self) -> DataParallelTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        del kind, trace
        try:
            self.close()
        except Exception:
            if error is None:
                raise

    def _raise_if_closed(self) -> None:
        """Before a step's program takes the state: a call that fails would lose it."""
        if self._closed:
            raise CommunicatorClosed("the trainer was closed; create a new one.")
        if self._collective is not None:
            self._collective.raise_if_failed()

    def _agreed_batches(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """The batches ready for the device, once no rank has refused its own."""
        arrays: list[Any] = []
        refusal: BadUse | None = None
        try:
            arrays = prepare_batches(batches, step, parts=self.local_parts, parts_per_rank=self.parts_per_rank,
                                     first_rank=self.world.first_rank, vocab_size=self.model.vocab_size)
        except BadUse as error:
            if not self.world.is_ranked:
                raise
            refusal = error
        agreed = agree_on_inputs(self._exchange, arrays, self.local_parts, refusal)
        check_counts(agreed.counts, self.parts_per_rank, self.config.uneven_inputs == "reject")
        return pad_batches(arrays, agreed.shape, self.config.accumulation_steps)

    def _make_collective(self) -> DeterministicCollective | None:
        if self.config.reducer == "psum":
            native.load_for(self.devices[0])  # microbatches are added by the native tree all the same
            return None
        largest = max([bucket.bytes for bucket in self.plan.buckets] + [64 << 20])
        return create_deterministic_collective(self.devices, capacity_bytes=largest, timeout_s=self.config.timeout_s)

    def _make_reducer(self) -> Reducer:
        if self._collective is None:
            return PsumReducer(AXIS, self.world_size)
        return TreeReducer(self._collective, self._collective)

    def _make_step(self, reducer: Reducer, rows: list[TrainState]) -> FusedStep | StagedStep:
        if self.config.resolved_step_mode == "fused":
            return FusedStep(self._rules, reducer, self.devices, rows, first_rank=self.world.first_rank)
        return StagedStep(self._rules, reducer, self.devices, rows, parts_per_rank=self.parts_per_rank,
                          first_part=self.world.first_rank * self.parts_per_rank, prepare_also=self._auditor.prepare)

    def _host_rows(self) -> TrainState:
        # Copies: on CPU an array may view device memory, which the next step takes as its own.
        return jax.tree.map(lambda leaf: np.array(leaf[0]), jax.device_get(self._step.rows[0]))

    def _metrics(self, step: int, outcome: StepOutcome, *, checked: bool, mismatch: Mismatch | None, digest: str,
                 verification_ms: float) -> StepMetrics:
        report = outcome.report
        stats = np.asarray(report["stats"], np.float32)
        total = tree_sum(stats)
        by_rank = [tree_sum(part) for part in np.split(stats, self.world_size)]
        rate = float(report["learning_rate"])
        return StepMetrics(
            step=step, loss=float(total[0] / total[1]),
            rank_losses=tuple(float(loss / weight) if weight else None for loss, weight in by_rank),
            tokens=int(total[1]), rank_tokens=tuple(int(weight) for _, weight in by_rank),
            learning_rate=None if math.isnan(rate) else rate, gradient_norm=float(report["gradient_norm"]),
            bucket_count=len(self.plan.buckets), parameter_count=self.plan.parameter_count,
            element_count=self.plan.element_count, forward_backward_ms=outcome.forward_backward_ms,
            communication_ms=outcome.communication_ms, optimizer_ms=outcome.optimizer_ms,
            verification_ms=verification_ms, total_ms=outcome.total_ms + verification_ms,
            parameter_check="skipped" if not checked else "ok" if mismatch is None else "mismatch",
            maximum_parameter_difference=_difference(checked, mismatch),
            gradient_digest=self._auditor.digest(report["gradient_fingerprints"]), parameter_digest=digest,
            peak_device_bytes=_peak_bytes(self.devices),
            update="applied" if report["finite"] else "skipped",
            compile_ms=outcome.compile_ms or None)

    def _raise_for(self, metrics: StepMetrics, mismatch: Mismatch | None, batches: Sequence[Batch]) -> None:
        error: NonFiniteGradient | ParameterMismatch | None = None
        if mismatch is not None:
            error = ParameterMismatch(f"step {metrics.step}: parameter {mismatch.leaf!r} of rank {mismatch.rank} has "
                                      f"other bits than rank 0's (largest difference {mismatch.maximum_difference}).")
        elif metrics.update == "skipped" and self.config.on_nonfinite == "raise":
            origin = nonfinite_origin(self._rules, self._auditor.specs, self._step.rows[0].parameters, self.devices[0],
                                      batches, metrics.step, self.world.first_rank, self._exchange,
                                      parts_per_rank=self.parts_per_rank)
            error = NonFiniteGradient(f"step {metrics.step}: the reduced gradient is not finite: {origin}. Parameters "
                                      "and optimizer state are unchanged.")
        if error is not None:
            error.metrics = metrics
            raise error


def _with_compute_dtype(model: Model, dtype: str) -> Model:
    if model.with_compute_dtype is not None:
        return model.with_compute_dtype(dtype)
    if dtype != "float32":
        raise ConfigError("compute_dtype", dtype, f"'float32' for the model {model.name!r}, which offers no other")
    return model


def _difference(checked: bool, mismatch: Mismatch | None) -> float | None:
    if not checked:
        return None
    return 0.0 if mismatch is None else mismatch.maximum_difference


def _peak_bytes(devices: Sequence[jax.Device]) -> int | None:
    """The largest peak of one device; None where the backend does not say (CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known else None
