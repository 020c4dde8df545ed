"""What becomes of a step: the run's owner keeps its record and its state; peers wait until that is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxdp.errors import CheckpointError
from jaxdp.runs import checkpoint, strict_json
from jaxdp.runs.checkpoint import State
from jaxdp.runs.layout import has_marker, step_folder
from jaxdp.runs.package import RunPackage
from jaxdp.runs.progress import Display
from jaxdp.runs.trace import step_records

if TYPE_CHECKING:
    from jaxdp.training.metrics import StepMetrics

_POLL_S = 0.02


class Keeper(Protocol):
    """Told of each step, in order; `save` comes after `record` of the same step."""

    def record(self, metrics: StepMetrics, validation_loss: float | None) -> None: ...

    def save(self, step: int, state: Callable[[], State]) -> None: ...


class Owner:
    """The process that writes the run's folder: the only one, or rank 0."""

    def __init__(self, package: RunPackage, display: Display, devices: Sequence[str], keep_checkpoints: int) -> None:
        self._package = package
        self._display = display
        self._devices = devices
        self._keep = keep_checkpoints

    def record(self, metrics: StepMetrics, validation_loss: float | None) -> None:
        """Appends the step to the package's metrics and trace, and shows it."""
        record = strict_json.to_plain(metrics) | {"validation_loss": strict_json.to_plain(validation_loss)}
        self._package.record(record, step_records(metrics, run_id=self._package.run_id, phase="train",
                                                  devices=self._devices))
        self._display.step(record)

    def save(self, step: int, state: Callable[[], State]) -> None:
        """Writes the state; only then are older checkpoints removed. Raises `CheckpointError`."""
        self._package.sync()
        checkpoint.save(self._package.checkpoints, state())
        if self._keep:
            checkpoint.retain(self._package.checkpoints, self._keep)


class Peer:
    """A rank that writes nothing. It leaves a checkpoint step once the owner's marker is down."""

    def __init__(self, checkpoints: Path, rank: int, timeout_s: float) -> None:
        self._checkpoints = checkpoints
        self._rank = rank
        self._timeout_s = timeout_s

    def record(self, metrics: StepMetrics, validation_loss: float | None) -> None:
        """Nothing: every rank has the same metrics and rank 0 writes them."""

    def save(self, step: int, state: Callable[[], State]) -> None:
        """Waits for the marker of `step`. Raises `CheckpointError` at the deadline."""
        deadline = time.monotonic() + self._timeout_s
        folder = step_folder(self._checkpoints, step)
        while not has_marker(folder):
            if time.monotonic() >= deadline:
                raise CheckpointError(f"rank {self._rank} waited {self._timeout_s:g} s for rank 0 to save {folder}. "
                                      f"See what rank 0 says, or give more by --checkpoint-timeout.")
            time.sleep(_POLL_S)
