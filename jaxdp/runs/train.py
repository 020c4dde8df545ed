"""`jaxdp train`: what is cheap is checked first, then the loop runs, then the run's package is closed."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdp.errors import ConfigError
from jaxdp.runs import environment, folder, job, manifest, platform
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.failure import DONE, INTERRUPTED, note, report
from jaxdp.runs.files import Files, write_durably
from jaxdp.runs.flags import named_by_flag
from jaxdp.runs.job import Job
from jaxdp.runs.layout import PLOT_FILE, SAMPLE_FILE
from jaxdp.runs.package import RunPackage
from jaxdp.runs.stop import StopRequest

if TYPE_CHECKING:
    from jaxdp.runs.progress import Display
    from jaxdp.runs.resume import Located
    from jaxdp.training.trainer import DataParallelTrainer

PROGRAM = "jaxdp train"
RUNS_FOLDER = Path("runs")
_SAMPLE_BYTES = 300
_TEMPERATURE = 0.8


def train(config: TrainConfig, command: Sequence[str]) -> int:
    """Runs the job that `config` describes; returns the exit code. `command` goes into the manifest.

    0 done, 1 failed, 2 bad use found in mid-run, 143 or 130 stopped by SIGTERM or Ctrl-C after a
    good checkpoint. Raises `BadUse` while nothing has been started. Call it in the main thread.
    """
    job.check_names(config)
    platform.select(config.platform, config.devices)
    path = Path(config.output) if config.output else folder.new_folder(RUNS_FOLDER, config.model)
    trace = Path(config.trace) if config.trace else None
    with RunPackage(path, resume=config.resume != "never", trace=trace) as package:
        try:
            prepared, start = _prepare(config, package)
        except BaseException:
            if config.output is None:
                shutil.rmtree(path, ignore_errors=True)
            raise
        if start is not None and start.state.step >= config.steps:
            return _nothing_to_do(config, prepared, package, start, command)
        _begin(config, prepared, package, start, command)
        return _run(config, prepared, package, start)


def _prepare(config: TrainConfig, package: RunPackage) -> tuple[Job, Located | None]:
    """Everything that may refuse the run, with nothing written yet. The first that imports JAX."""
    from jaxdp.runs import resume

    if package.previous_owner is not None:
        note(f"took over {package.path} from a run that died ({package.previous_owner})")
    prepared = job.prepare(config)
    platform.check_devices(config.platform, config.devices)
    _check_sample(config, prepared)
    start = resume.starting_point(config.resume, package.path)
    if start is not None:
        job.refuse_changes(start.state.identity, prepared.identity)
        _tell_changes(config, manifest.read(package.path) or {})
    return prepared, start


def _check_sample(config: TrainConfig, prepared: Job) -> None:
    from jaxdp.runs.sample import can_sample

    if config.sample and not can_sample(prepared.model):
        raise ConfigError("sample", True, f"left out for the model {config.model}, whose tokens are not bytes")


def _tell_changes(config: TrainConfig, previous: dict[str, Any]) -> None:
    before = previous.get("configuration", {})
    names = ["reducer", "step_mode"] + ([] if config.shards else ["devices"])
    for name in names:
        if name in before and before[name] != getattr(config, name):
            note(f"{name} was {before[name]!r} and is now {getattr(config, name)!r}: "
                 f"from here on the bits may differ from those of an uninterrupted run")


def _begin(config: TrainConfig, prepared: Job, package: RunPackage, start: Located | None,
           command: Sequence[str]) -> None:
    devices = [entry | {"rank": entry["index"] if entry["index"] < config.devices else None}
               for entry in environment.devices()]
    resumed_from = None if start is None else {
        "step": start.state.step, "checkpoint": start.folder,
        "passed_over": [{"step": skipped.step, "reason": skipped.reason} for skipped in start.passed_over]}
    configuration = config.as_dict() | {"identity": prepared.identity, "resumed_from": resumed_from}
    package.begin(step=0 if start is None else start.state.step, configuration=configuration, command=command,
                  devices=devices, data_sha256=prepared.data_sha256)


def _nothing_to_do(config: TrainConfig, prepared: Job, package: RunPackage, start: Located,
                   command: Sequence[str]) -> int:
    note(f"{start.folder} is at step {start.state.step} of {config.steps}: nothing to do")
    before = manifest.read(package.path)
    if before is not None and before.get("status") != "completed" and start.state.step == config.steps:
        _begin(config, prepared, package, start, command)  # the run died between its last save and its summary
        package.finish("completed", DONE)
    return DONE


def _run(config: TrainConfig, prepared: Job, package: RunPackage, start: Located | None) -> int:
    from jaxdp.runs.progress import make_display

    display = make_display(json=config.json)
    status, code = "completed", DONE
    with StopRequest() as stop:
        try:
            last = _train(config, prepared, package, start, display, stop)
            if last < config.steps:
                status, code = "interrupted", stop.exit_code
        except BaseException as error:
            display.close()
            code = report(named_by_flag(error, TrainConfig) if isinstance(error, ConfigError) else error, PROGRAM)
            status = "interrupted" if code == INTERRUPTED else "failed"
        package.finish(status, code)
    return code


def _train(config: TrainConfig, prepared: Job, package: RunPackage, start: Located | None, display: Display,
           stop: StopRequest) -> int:
    from jaxdp.runs.loop import Loop, describe_collective
    from jaxdp.training.trainer import DataParallelTrainer

    with DataParallelTrainer(prepared.model, config.seed, config.data_parallel()) as trainer:
        package.describe({"collective": describe_collective(trainer)})
        loop = Loop(config, prepared, trainer, package, display, None if start is None else start.state)
        display.start(_header(config, package, trainer, loop.first_step), loop.first_step, config.steps)
        last = loop.run(stop)
        display.close()
        display.say(_closing(config, prepared, package, trainer, last, stop))
    return last


def _header(config: TrainConfig, package: RunPackage, trainer: DataParallelTrainer, first_step: int) -> list[str]:
    plan, buckets = trainer.plan, len(trainer.plan.buckets)
    device = trainer.devices[0]
    shards = f", {config.shards} shards" if config.shards else ""
    return [f"model {config.model}: {plan.element_count:,} parameters in {plan.parameter_count} tensors, "
            f"{buckets} bucket{'' if buckets == 1 else 's'}",
            f"data {config.data}, {config.batch} sequences a {'shard' if config.shards else 'device'}",
            f"{trainer.world_size} x {device.platform} ({device.device_kind}){shards}, reducer {config.reducer}",
            f"steps {first_step} to {config.steps}, run package {package.path}"]


def _closing(config: TrainConfig, prepared: Job, package: RunPackage, trainer: DataParallelTrainer, last: int,
             stop: StopRequest) -> list[str]:
    from jaxdp.runs.plot import plot_loss

    records = package.records()
    lines = [f"loss {records[-1]['loss']} after step {last}"]
    if config.sample and last == config.steps:
        lines += ["sample:", _sample(config, prepared, package, trainer)]
    lines.append(f"run package: {package.path}")
    if plot_loss(records, package.path / PLOT_FILE, f"{config.model} on {config.data}"):
        lines.append(f"plot: {package.path / PLOT_FILE}")
    else:
        lines.append("plot: none, for matplotlib is not installed (pip install 'jaxdp[plot]')")
    if last < config.steps:
        note(f"stopped by {signal.Signals(stop.signal_number or 0).name} after step {last}, which is saved; "
             f"go on by --resume auto")
    return lines


def _sample(config: TrainConfig, prepared: Job, package: RunPackage, trainer: DataParallelTrainer) -> str:
    from jaxdp.runs.sample import generate

    text = generate(prepared.model, trainer.parameters(), prompt=b"", length=_SAMPLE_BYTES,
                    temperature=_TEMPERATURE, seed=config.seed)
    write_durably(Files(), package.path / SAMPLE_FILE, [text])
    return text.decode("utf-8", "replace")
