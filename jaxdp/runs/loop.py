"""The training loop: step, evaluate, record, save, until the last step or an agreed stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxdp.data import mean_loss
from jaxdp.errors import StepFailure
from jaxdp.ranked import recorder
from jaxdp.runs.checkpoint import State
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.job import Job
from jaxdp.runs.keeper import Keeper
from jaxdp.runs.stop import Stop

if TYPE_CHECKING:
    from jaxdp.training.trainer import DataParallelTrainer

_EVALUATION_CHUNK = 8  # batches at a time, at every world size: the sums are grouped alike


class Loop:
    """Trains from the step after `start` (a state, or None for the beginning) on.

    Each step goes to `keeper`, which is asked to save every `checkpoint_every` steps, at the last
    step, and at the step at which the run stops. `rank` is this process's, 0 unless it is one of
    several: every process makes the batches of its own ranks alone.
    """

    def __init__(self, config: TrainConfig, job: Job, trainer: DataParallelTrainer, keeper: Keeper, start: State | None,
                 rank: int = 0) -> None:
        self._config = config
        self._job = job
        self._trainer = trainer
        self._keeper = keeper
        self._samples = 0
        self._first_part = rank * trainer.local_parts
        self.first_step = 1
        if start is not None:
            trainer.load_state_tensors(start.tensors, start.step)
            self._samples = int(start.cursor["samples"])
            self.first_step = start.step + 1

    def run(self, stop: Stop) -> int:
        """Returns the last step that was done; less than `steps` only if `stop` was due."""
        step, every = self.first_step, self._config.checkpoint_every
        while True:
            self._do_step(step)
            last = step == self._config.steps or stop.is_due(step)
            if last or (every and step % every == 0):
                recorder.note("save")
                self._keeper.save(step, lambda step=step: self._state(step))
            if last:
                return step
            step += 1

    def _do_step(self, step: int) -> None:
        recorder.note("batches", step)
        batches = self._batches()
        recorder.note("update" if step != self.first_step else recorder.FIRST_UPDATE)
        try:
            metrics = self._trainer.step(batches, step)
        except StepFailure as failure:
            if failure.metrics is not None:
                self._keeper.record(failure.metrics, None)
            raise
        self._samples = self._job.train.cursor_after(self._samples, self._trainer.parts)
        loss = self._validation_loss(step)
        recorder.note("record")
        self._keeper.record(metrics, loss)

    def _batches(self) -> list[Any]:
        source = self._job.train
        return [source.batch(self._samples + (self._first_part + part) * source.sequences)
                for part in range(self._trainer.local_parts)]

    def _validation_loss(self, step: int) -> float | None:
        batches, every = self._job.validation, self._config.eval_every
        if batches is None or (step % every and step != self._config.steps):
            return None
        sums = []
        for first in range(0, len(batches), _EVALUATION_CHUNK):
            recorder.note("evaluate")
            chunk = range(first, min(first + _EVALUATION_CHUNK, len(batches)))
            sums.append(self._trainer.evaluate([batches.batch(index) for index in chunk]))
        return mean_loss((loss for loss, _ in sums), (tokens for _, tokens in sums))

    def _state(self, step: int) -> State:
        return State(step=step, tensors=self._trainer.state_tensors(), cursor={"samples": self._samples},
                     identity=self._job.identity)
