"""Trains one cell of `jaxdp prove`, in this process or with a process a rank. Imports JAX."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from jaxdp.collectives import DeterministicCollective, Transport, create_deterministic_collective
from jaxdp.config import DataParallelConfig
from jaxdp.errors import JaxdpError
from jaxdp.models import Model
from jaxdp.runs import checkpoint, job, strict_json
from jaxdp.runs.checkpoint import State
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.layout import CHECKPOINTS_FOLDER, METRICS_FILE
from jaxdp.runs.loop import Loop
from jaxdp.runs.stop import StopRequest
from jaxdp.tools.matrix import Cell, Record, Trail
from jaxdp.training.metrics import StepMetrics
from jaxdp.training.trainer import DataParallelTrainer

_JAXDP = (sys.executable, "-P", "-c", "import sys; from jaxdp.cli import main; sys.exit(main())")
_FLAGS = ("model", "data", "context", "steps", "seed", "batch", "shards", "platform", "bucket_bytes")
_LAST_LINES = 5


def of_cell(cell: Cell, config: TrainConfig, folder: Path) -> Trail:
    """Trains in this process; a cell that stops in the middle goes on from its checkpoint in `folder`."""
    prepared = job.prepare(config)
    keeper = _Keeper(folder)
    legs = [(cell.world, config.steps)]
    if cell.then is not None:
        legs = [(cell.world, config.steps // 2), (cell.then, config.steps)]
    start: State | None = None
    for world, last in legs:
        leg = dataclasses.replace(config, devices=world, steps=last)
        with _TransportTrainer(prepared.model, config.seed, leg.data_parallel(), cell.transport) as trainer:
            Loop(leg, prepared, trainer, keeper, start).run(StopRequest())
        start = keeper.state
    assert start is not None, "the loop saves its last step"
    return Trail(keeper.records, start)


def of_ranks(cell: Cell, config: TrainConfig, folder: Path) -> Trail:
    """Trains by `jaxdp launch`, a process a rank. Raises `JaxdpError` with what the launcher said."""
    flags = [word for name in _FLAGS if (value := getattr(config, name)) is not None
             for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [*_JAXDP, "launch", "--nproc", str(cell.world), "--", "train", *flags, "--output", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " | ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        raise JaxdpError(f"{cell.name}: jaxdp launch exited {done.returncode}: {said}")
    found = checkpoint.newest_good(folder / CHECKPOINTS_FOLDER).state
    if found is None:
        raise JaxdpError(f"{cell.name}: jaxdp launch left no checkpoint in {folder}.")
    return Trail(strict_json.read_records(folder / METRICS_FILE), found)


class _Keeper:
    """Keeps records in memory, as they would be written, and the last state as it comes back from disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.records: list[Record] = []
        self.state: State | None = None

    def record(self, metrics: StepMetrics, validation_loss: float | None) -> None:
        """Called by the loop after each step."""
        del validation_loss
        self.records.append(strict_json.to_plain(metrics))

    def save(self, step: int, state: Callable[[], State]) -> None:
        """Called by the loop after its last step."""
        del step
        self.state = checkpoint.load(checkpoint.save(self._folder, state()))


class _TransportTrainer(DataParallelTrainer):
    """A trainer whose ranks meet over a transport of one's choice, which users leave to `auto`."""

    def __init__(self, model: Model, seed: int, config: DataParallelConfig, transport: Transport) -> None:
        self._transport: Transport = transport
        super().__init__(model, seed, config)

    def _make_collective(self) -> DeterministicCollective | None:
        if self._transport == "auto":
            return super()._make_collective()
        return create_deterministic_collective(self.devices, timeout_s=self.config.timeout_s,
                                               transport=self._transport)
