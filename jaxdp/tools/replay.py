"""`jaxdp replay RUN --step N`: does one step of a run again and compares its numbers with the record."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdp.errors import BadUse, CheckpointError, StepFailure
from jaxdp.runs import environment, manifest, platform, strict_json
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.failure import note
from jaxdp.runs.layout import CHECKPOINTS_FOLDER, METRICS_FILE, list_steps
from jaxdp.tools.difference import record_differences
from jaxdp.tools.options import ReplayOptions

if TYPE_CHECKING:
    from jaxdp.runs.checkpoint import State
    from jaxdp.training.metrics import StepMetrics

SAME, DIFFERENT = 0, 1
_PACKAGES = ("jax", "jaxlib", "jax-rocm7-pjrt", "jax-cuda13-pjrt", "flax", "optax")


@dataclasses.dataclass(frozen=True)
class Session:
    """One start of a run: its manifest, and the step that it went on from (0: from the beginning)."""

    manifest: Mapping[str, Any]
    begin: int

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The flags of the run, its world size and identity."""
        return self.manifest["configuration"]


def replay(options: ReplayOptions) -> int:
    """Does the steps after the nearest earlier good checkpoint up to `step` again; 0: the same bits, 1: others.

    Raises `BadUse` where the run has no record of the step, or cannot be replayed.
    """
    run = Path(options.run)
    step = _known_step(run, options.step)
    session = session_of(run, step)
    devices = _devices(session, options.devices)
    chosen = options.platform or session.configuration["platform"]
    platform.select(chosen, devices)
    _tell_changes(session)
    start = _start(run, step, session)
    begin = 0 if start is None else start.step
    config = _train_config(session, devices=devices, steps=step, platform=chosen)
    recorded = {record["step"]: record for record in strict_json.read_records(run / METRICS_FILE)}
    found = first_difference(recorded, _train(config, session, start))
    _write(options, step, begin, devices, found)
    return SAME if found is None else DIFFERENT


def session_of(run: Path, step: int) -> Session:
    """The start of `run` that did `step`: the last one that went on from an earlier step."""
    found: Session | None = None
    for path in [*sorted(run.glob("manifest-*.json"), key=_number), run / "manifest.json"]:
        content = manifest.read_file(path)
        if content is None or "identity" not in content.get("configuration", {}):
            continue
        begin = (content["configuration"].get("resumed_from") or {"step": 0})["step"]
        if begin < step:
            found = Session(content, begin)
    if found is None:
        raise BadUse(f"{run} has no manifest that says how step {step} was done.")
    return found


def first_difference(recorded: Mapping[int, Mapping[str, Any]], again: list[dict[str, Any]]) -> str | None:
    """The first step whose numbers differ, with what differs there; steps without a record are passed over."""
    for record in again:
        before = recorded.get(record["step"])
        if before is not None and (found := record_differences(before, record)):
            return f"step {record['step']}: {'; '.join(found)}"
    return None


def _number(path: Path) -> int:
    text = path.stem.removeprefix("manifest-")
    return int(text) if text.isdecimal() else 0


def _known_step(run: Path, step: int | None) -> int:
    if step is None:
        raise BadUse("--step must be given: which step to do again.")
    steps = [record["step"] for record in strict_json.read_records(run / METRICS_FILE)]
    if not steps:
        raise BadUse(f"{run} holds no record of a step. Name a run's folder.")
    if step not in steps:
        raise BadUse(f"--step must be a step that {run} has a record of, {min(steps)} to {max(steps)}; got {step}.")
    return step


def _devices(session: Session, asked: int | None) -> int:
    world, shards = int(session.configuration["world_size"]), session.configuration["shards"]
    if asked is not None and asked != world and not shards:
        raise BadUse(f"--devices must be {world}, or left out: without shards a step's bits depend on the world size; "
                     f"got {asked}.")
    return asked or world


def _start(run: Path, step: int, session: Session) -> State | None:
    """The newest good state before `step`; None: from the seed."""
    from jaxdp.runs import checkpoint

    for saved, folder in reversed(list_steps(run / CHECKPOINTS_FOLDER)):
        if saved < step and (session.configuration["shards"] or saved >= session.begin):
            try:
                return checkpoint.load(folder)
            except CheckpointError as error:
                note(f"passed over step {saved}: {error}")
    if session.begin and not session.configuration["shards"]:
        raise BadUse(f"{run} has no good checkpoint from step {session.begin}, where it was resumed, to step "
                     f"{step - 1}: without shards the steps before may have been done in another way.")
    return None


def _train_config(session: Session, **changes: Any) -> TrainConfig:
    names = {field.name for field in dataclasses.fields(TrainConfig)} & session.configuration.keys()
    usual: dict[str, Any] = {"output": None, "resume": "never", "trace": None, "checkpoint_every": 0, "eval_every": 0,
                             "sample": False}
    return TrainConfig(**({name: session.configuration[name] for name in names} | usual | changes))


def _train(config: TrainConfig, session: Session, start: State | None) -> list[dict[str, Any]]:
    """The records of the steps after `start`, as a run would write them."""
    from jaxdp.runs import job
    from jaxdp.runs.loop import Loop
    from jaxdp.runs.stop import StopRequest
    from jaxdp.training.trainer import DataParallelTrainer

    job.check_names(config)
    prepared = job.prepare(config)
    job.refuse_changes(session.configuration["identity"], prepared.identity)
    platform.check_devices(config.platform, config.devices)
    keeper = _Records()
    with DataParallelTrainer(prepared.model, config.seed, config.data_parallel()) as trainer:
        loop = Loop(config, prepared, trainer, keeper, start)
        with contextlib.suppress(StepFailure):  # the record of such a step is there to be compared, too
            loop.run(StopRequest())
    return keeper.records


def _tell_changes(session: Session) -> None:
    """Says what differs from then and may change bits."""
    before, now = session.manifest.get("packages", {}), environment.packages()
    for name in _PACKAGES:
        if before.get(name) != now.get(name):
            note(f"{name} was {before.get(name)} and is now {now.get(name)}: the bits may differ for that alone")
    if session.configuration["ranked"] and not session.configuration["shards"]:
        note("the run had a process a rank and no shards: in one process the bits may differ for that alone")


def _write(options: ReplayOptions, step: int, begin: int, devices: int, found: str | None) -> None:
    origin = f"from the checkpoint of step {begin}" if begin else "from the seed"
    if options.json:
        content = {"step": step, "same": found is None, "difference": found, "from_step": begin, "world": devices}
        sys.stdout.write(strict_json.dumps(content) + "\n")
    elif found is None:
        steps = f"step {step} has" if begin == step - 1 else f"steps {begin + 1} to {step} have"
        sys.stdout.write(f"{steps} the same loss and digests again, {origin}, at world {devices}\n")
    else:
        sys.stdout.write(f"{found} (recorded, and again {origin} at world {devices})\n")


class _Records:
    """Keeps the records of a loop and nothing else."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def record(self, metrics: StepMetrics, validation_loss: float | None) -> None:
        """Called by the loop after each step."""
        del validation_loss
        self.records.append(strict_json.to_plain(metrics))

    def save(self, step: int, state: Callable[[], State]) -> None:
        """A replay leaves no file."""
