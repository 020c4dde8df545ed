"""`jaxdp train`: what is cheap is checked first, then the loop runs, then the run's package is closed."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdp.errors import ConfigError
from jaxdp.ranked import context as ranked
from jaxdp.runs import environment, folder, job, manifest, platform
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.failure import DONE, INTERRUPTED, note, report
from jaxdp.runs.flags import named_by_flag
from jaxdp.runs.package import RunPackage
from jaxdp.runs.stop import AnnouncedStop, StopRequest

if TYPE_CHECKING:
    from jaxdp.runs.prepare import Prepared
    from jaxdp.runs.progress import Display

PROGRAM = "jaxdp train"
RUNS_FOLDER = Path("runs")


def train(config: TrainConfig, command: Sequence[str]) -> int:
    """Runs the job that `config` describes; returns the exit code. `command` goes into the manifest.

    0 done, 1 failed, 2 bad use found in mid-run, 143 or 130 stopped by SIGTERM or Ctrl-C after a
    good checkpoint. Raises `BadUse` while nothing has been started. Where `RANK`, `LOCAL_RANK` and
    `WORLD_SIZE` are set it is one rank of several. Call it in the main thread.
    """
    context = ranked.from_environment()
    job.check_names(config)
    platform.select(config.platform, config.devices)
    _check_ranked(config, context)
    if context is not None and context.rank > 0:
        from jaxdp.runs import peer

        return peer.follow(config, context)
    path = Path(config.output) if config.output else folder.new_folder(RUNS_FOLDER, config.model)
    trace = Path(config.trace) if config.trace else None
    with RunPackage(path, resume=config.resume != "never", trace=trace) as package:
        return _own(config, package, context, command)


def _check_ranked(config: TrainConfig, context: ranked.RankContext | None) -> None:
    """Refuses what a process that is one rank of several cannot do."""
    if context is None:
        return
    if config.devices != 1:
        raise ConfigError("devices", config.devices, "1, or left out, in a ranked process, which has one device")
    if config.output is None:
        raise ConfigError("output", None, "given in a ranked run: all ranks need the same folder")


def _own(config: TrainConfig, package: RunPackage, context: ranked.RankContext | None, command: Sequence[str]) -> int:
    """The part of the process that owns the package: the only one, or rank 0."""
    from jaxdp.runs.prepare import prepare

    if package.previous_owner is not None:
        note(f"took over {package.path} from a run that died ({package.previous_owner})")
    try:
        prepared = prepare(config, package.path)
    except BaseException:
        if config.output is None:
            shutil.rmtree(package.path, ignore_errors=True)
        raise
    run = _Run(config, package, context, command, prepared)
    return run.nothing_to_do() if prepared.first_step > config.steps else run.run()


@dataclasses.dataclass(frozen=True)
class _Run:
    config: TrainConfig
    package: RunPackage
    context: ranked.RankContext | None
    command: Sequence[str]
    prepared: Prepared

    def nothing_to_do(self) -> int:
        done = self.prepared.first_step - 1
        note(f"the run is at step {done} of {self.config.steps}: nothing to do")
        before = manifest.read(self.package.path)
        if before is not None and before.get("status") != "completed" and done == self.config.steps:
            self._begin()  # the run died between its last save and its summary
            self.package.finish("completed", DONE)
        return DONE

    def run(self) -> int:
        from jaxdp.runs.progress import make_display

        self._tell_changes()
        self._begin()
        display = make_display(json=self.config.json)
        status, code = "completed", DONE
        with StopRequest() if self.context is None else AnnouncedStop(self.package.path) as stop:
            try:
                last = self._train(display, stop)
                if last < self.config.steps:
                    status, code = "interrupted", stop.exit_code
            except BaseException as error:
                display.close()
                code = report(named_by_flag(error, TrainConfig) if isinstance(error, ConfigError) else error, PROGRAM)
                status = "interrupted" if code == INTERRUPTED else "failed"
            self.package.finish(status, code)
        return code

    def _train(self, display: Display, stop: StopRequest) -> int:
        from jaxdp.runs import closing
        from jaxdp.runs.keeper import Owner
        from jaxdp.runs.loop import Loop
        from jaxdp.runs.prepare import device_indices
        from jaxdp.training.trainer import DataParallelTrainer

        config, prepared = self.config, self.prepared
        data_parallel = config.data_parallel(device_indices(config, self.context))
        with DataParallelTrainer(prepared.job.model, config.seed, data_parallel) as trainer:
            self.package.describe({"collective": closing.describe_collective(trainer)})
            keeper = Owner(self.package, display, [str(device) for device in trainer.devices], config.keep_checkpoints)
            loop = Loop(config, prepared.job, trainer, keeper, prepared.start and prepared.start.state)
            display.start(closing.header(config, self.package.path, trainer, loop.first_step), loop.first_step,
                          config.steps)
            last = loop.run(stop)
            parameters = trainer.parameters() if config.sample and last == config.steps else None
        display.close()
        # Only now, for peers must not wait in the trainer's close for a plot or a sample.
        display.say(closing.lines(config, self.package, prepared.job.model, last, parameters))
        if last < config.steps:
            note(f"{closing.stopped(stop.signal_number, last)}; go on by --resume auto")
        return last

    def _begin(self) -> None:
        config, start = self.config, self.prepared.start
        devices = [entry | {"rank": entry["index"] if entry["index"] < config.devices else None}
                   for entry in environment.devices()]
        resumed_from = None if start is None else {
            "step": start.state.step, "checkpoint": start.folder,
            "passed_over": [{"step": skipped.step, "reason": skipped.reason} for skipped in start.passed_over]}
        configuration = config.as_dict() | {
            "world_size": config.devices if self.context is None else self.context.world_size,
            "ranked": self.context is not None, "identity": self.prepared.job.identity, "resumed_from": resumed_from}
        self.package.begin(step=self.prepared.first_step - 1, configuration=configuration, command=self.command,
                           devices=devices, data_sha256=self.prepared.job.data_sha256)

    def _tell_changes(self) -> None:
        """Says what a resume may change but what bits depend on."""
        before: dict[str, Any] = (manifest.read(self.package.path) or {}).get("configuration", {})
        now = self.config.as_dict() | {
            "world_size": self.config.devices if self.context is None else self.context.world_size}
        names = ["reducer", "step_mode"] + ([] if self.config.shards else ["world_size"])
        for name in names if self.prepared.start is not None else []:
            if name in before and before[name] != now[name]:
                note(f"{name} was {before[name]!r} and is now {now[name]!r}: from here on the bits may differ "
                     f"from those of an uninterrupted run")
