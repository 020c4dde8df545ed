"""The training loop: step, evaluate, record, save, until the last step or a request to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxdp.data import mean_loss
from jaxdp.errors import StepFailure
from jaxdp.runs import checkpoint, strict_json
from jaxdp.runs.checkpoint import State
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.job import Job
from jaxdp.runs.package import RunPackage
from jaxdp.runs.progress import Display
from jaxdp.runs.stop import StopRequest
from jaxdp.runs.trace import step_records

if TYPE_CHECKING:
    from jaxdp.training.metrics import StepMetrics
    from jaxdp.training.trainer import DataParallelTrainer

_EVALUATION_CHUNK = 8  # batches at a time, at every world size: the sums are grouped alike


class Loop:
    """Trains from the step after `start` (a state, or None for the beginning) on.

    After each step its record is in the package; a checkpoint is saved every `checkpoint_every`
    steps, at the last step, and at the step at which the run is asked to stop.
    """

    def __init__(self, config: TrainConfig, job: Job, trainer: DataParallelTrainer, package: RunPackage,
                 display: Display, start: State | None) -> None:
        self._config = config
        self._job = job
        self._trainer = trainer
        self._package = package
        self._display = display
        self._samples = 0
        self.first_step = 1
        if start is not None:
            trainer.load_state_tensors(start.tensors, start.step)
            self._samples = int(start.cursor["samples"])
            self.first_step = start.step + 1

    def run(self, stop: StopRequest) -> int:
        """Returns the last step that was done; less than `steps` only if `stop` was asked for."""
        step = self.first_step
        while True:
            self._do_step(step)
            last = step == self._config.steps or bool(stop)
            every = self._config.checkpoint_every
            if last or (every and step % every == 0):
                self._save(step)
            if last:
                return step
            step += 1

    def _do_step(self, step: int) -> None:
        parts, source = self._trainer.parts, self._job.train
        try:
            metrics = self._trainer.step(source.batches(self._samples, parts), step)
        except StepFailure as failure:
            if failure.metrics is not None:
                self._record(failure.metrics, None)
            raise
        self._samples = source.cursor_after(self._samples, parts)
        self._record(metrics, self._validation_loss(step))

    def _record(self, metrics: StepMetrics, validation_loss: float | None) -> None:
        record = strict_json.to_plain(metrics) | {"validation_loss": strict_json.to_plain(validation_loss)}
        trace = step_records(metrics, run_id=self._package.run_id, phase="train",
                             devices=[str(device) for device in self._trainer.devices])
        self._package.record(record, trace)
        self._display.step(record)

    def _validation_loss(self, step: int) -> float | None:
        batches, every = self._job.validation, self._config.eval_every
        if batches is None or (step % every and step != self._config.steps):
            return None
        sums = [self._trainer.evaluate([batches.batch(index) for index in
                                        range(first, min(first + _EVALUATION_CHUNK, len(batches)))])
                for first in range(0, len(batches), _EVALUATION_CHUNK)]
        return mean_loss((loss for loss, _ in sums), (tokens for _, tokens in sums))

    def _save(self, step: int) -> None:
        state = State(step=step, tensors=self._trainer.state_tensors(), cursor={"samples": self._samples},
                      identity=self._job.identity)
        self._package.sync()
        checkpoint.save(self._package.checkpoints, state)
        if self._config.keep_checkpoints:
            checkpoint.retain(self._package.checkpoints, self._config.keep_checkpoints)


def describe_collective(trainer: DataParallelTrainer) -> dict[str, Any] | None:
    """What reduces the gradients and why, for the manifest; None for the psum reducer."""
    known = trainer.capabilities
    if known is None:
        return None
    return {"backend": known.backend, "transport": known.transport, "transport_reason": known.transport_reason,
            "device_names": known.device_names, "reduction_order": known.reduction_order}
