"""`jaxdp compare A B`: the first step, then the first parameter, where two runs or checkpoints differ."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxdp.errors import BadUse, CheckpointError
from jaxdp.runs import checkpoint, resume, strict_json
from jaxdp.runs.checkpoint import State
from jaxdp.runs.layout import CHECKPOINTS_FOLDER, METRICS_FILE, finished_steps
from jaxdp.tools.difference import first_tensor_difference, record_differences
from jaxdp.tools.options import CompareOptions

SAME, DIFFERENT = 0, 1


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether two things are the same, and the lines that say where they are not."""

    same: bool
    lines: list[str]


def compare(options: CompareOptions) -> int:
    """Prints where A and B first differ; returns 0 for the same, 1 for different.

    Raises `BadUse` when one of them is not there, cannot be read, or has no step in common.
    """
    left, right = Path(options.a), Path(options.b)
    try:
        verdict = compare_paths(left, right)
    except CheckpointError as error:
        raise BadUse(str(error)) from error
    sys.stdout.write("".join(line + "\n" for line in verdict.lines))
    return SAME if verdict.same else DIFFERENT


def compare_paths(left: Path, right: Path) -> Verdict:
    """Two runs by their records and checkpoints; else two checkpoints by their tensors."""
    if _is_run(left) and _is_run(right):
        return compare_runs(left, right)
    return compare_states(_state(left, right), _state(right, left))


def compare_runs(left: Path, right: Path) -> Verdict:
    """The first common step whose loss or digests differ, then the first tensor of the next common checkpoint."""
    records = [{record["step"]: record for record in strict_json.read_records(path / METRICS_FILE)}
               for path in (left, right)]
    common = sorted(records[0].keys() & records[1].keys())
    if not common:
        raise BadUse(f"{left} and {right} have no step in common.")
    for step in common:
        if found := record_differences(records[0][step], records[1][step]):
            lines = [f"step {step} is the first that differs: {'; '.join(found)}"]
            return Verdict(False, lines + _name_parameter(left, right, step))
    verdict = _compare_saved(left, right)
    if not verdict.same:
        return verdict
    return Verdict(True, [f"the same over steps {common[0]} to {common[-1]}", *_longer(left, right, records)])


def compare_states(left: State, right: State) -> Verdict:
    """Two states by step, data cursor and the bits of every tensor. What they were trained with is only told."""
    lines = _identity_note(left, right)
    for name in ("step", "cursor"):
        if getattr(left, name) != getattr(right, name):
            return Verdict(False, [f"{name} {getattr(left, name)} and {getattr(right, name)}", *lines])
    difference = first_tensor_difference(left.tensors, right.tensors)
    if difference is None:
        return Verdict(True, [f"the same state after step {left.step}: {len(left.tensors)} tensors", *lines])
    at = "" if difference.index is None else f" at {list(difference.index)}"
    return Verdict(False, [f"after step {left.step}, {difference.name}{at} differs: {difference.reason}", *lines])


def _state(path: Path, other: Path) -> State:
    """The state that `path` means; of a run, the one after the step of the checkpoint `other`."""
    if not _is_run(path):
        return resume.locate(path).state
    step = resume.locate(other).state.step
    folder = dict(finished_steps(path / CHECKPOINTS_FOLDER)).get(step)
    if folder is None:
        raise BadUse(f"{path} has no checkpoint of step {step}, the one of {other}.")
    return checkpoint.load(folder)


def _is_run(path: Path) -> bool:
    return (path / METRICS_FILE).is_file()


def _common_checkpoints(left: Path, right: Path) -> list[tuple[Path, Path]]:
    saved = [dict(finished_steps(path / CHECKPOINTS_FOLDER)) for path in (left, right)]
    return [(saved[0][step], saved[1][step]) for step in sorted(saved[0].keys() & saved[1].keys())]


def _name_parameter(left: Path, right: Path, step: int) -> list[str]:
    """The first tensor that differs in the first common checkpoint from `step` on."""
    later = [pair for pair in _common_checkpoints(left, right) if int(pair[0].name.removeprefix("step-")) >= step]
    if not later:
        return [f"no checkpoint from step {step} on is in both, so no parameter can be named"]
    return compare_states(*(checkpoint.load(folder) for folder in later[0])).lines


def _compare_saved(left: Path, right: Path) -> Verdict:
    """The common checkpoints: equal files are equal states; others are compared tensor by tensor."""
    for pair in _common_checkpoints(left, right):
        if len({checkpoint.read_marker(folder)["sha256"] for folder in pair}) > 1:
            verdict = compare_states(*(checkpoint.load(folder) for folder in pair))
            if not verdict.same:
                return verdict
    return Verdict(True, [])


def _longer(left: Path, right: Path, records: list[dict[int, Any]]) -> list[str]:
    last = [max(steps) for steps in records]
    if last[0] == last[1]:
        return []
    path, step = (left, last[0]) if last[0] > last[1] else (right, last[1])
    return [f"{path} goes on to step {step}"]


def _identity_note(left: State, right: State) -> list[str]:
    differing = [name for name in sorted({*left.identity, *right.identity})
                 if left.identity.get(name) != right.identity.get(name)]
    return [f"note: trained with different {', '.join(differing)}"] if differing else []
