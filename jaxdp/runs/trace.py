"""The trace of a run: one record a stage of a step (`trace.jsonl`), and its Chrome/Perfetto form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdp.errors import DataError
from jaxdp.runs import strict_json
from jaxdp.runs.layout import TRACE_FILE

if TYPE_CHECKING:
    from jaxdp.training.metrics import StepMetrics

SCHEMA_VERSION = 1
FRAMEWORK = "jaxdp"
_PREFIX = "data_parallel."
_STAGES = ("forward_backward", "all_reduce", "optimizer", "verification")  # in the order of a step


def step_records(metrics: StepMetrics, *, run_id: str, phase: str, devices: Sequence[str]) -> list[dict[str, Any]]:
    """The records of one step, without `sequence`: forward/backward of each rank, then one a stage.

    `rank` and `device` are None for what all ranks do together; `devices` names the device of each
    rank of `metrics.rank_losses`, as far as this process knows it. `wall_ms` is None where the step
    mode cannot know it. `statistics` are those of the loss, None where a record is not about one.
    """
    common = {"schema_version": SCHEMA_VERSION, "framework": FRAMEWORK, "run_id": run_id, "phase": phase,
              "iteration": metrics.step}
    elements = [metrics.element_count]
    records = [_record("model", "forward_backward", metrics.forward_backward_ms, [], loss, rank,
                       devices[rank] if rank < len(devices) else None)
               for rank, loss in enumerate(metrics.rank_losses)]
    records += [_record("operator", "all_reduce", metrics.communication_ms, elements),
                _record("operator", "optimizer", metrics.optimizer_ms, elements),
                _record("parameter", "verification", metrics.verification_ms, elements),
                _record("model", "step", metrics.total_ms, [], metrics.loss)]
    return [common | record for record in records]


def export(source: Path) -> dict[str, Any]:
    """The trace at `source` (a file, or a run's folder) in the Chrome/Perfetto JSON form.

    Time is the steps' own: each step starts where the one before ended and its stages follow one
    another, for a record has a duration and no start. A stage without a known duration is left
    out. Raises `DataError` where there is no trace.
    """
    path = source / TRACE_FILE if source.is_dir() else source
    records = [strict_json.restore_numbers(record) for record in strict_json.read_records(path)]
    if not records:
        raise DataError(f"{path} holds no trace records. Name a run's folder or a trace.jsonl.")
    events = _names(1 + max((record["rank"] for record in records if record["rank"] is not None), default=-1))
    start_us = 0.0
    for iteration in _iterations(records):
        events += _step_events(iteration, start_us)
        start_us += 1e3 * max(_wall_ms(record) for record in iteration)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _record(kind: str, name: str, wall_ms: float | None, shape: list[int], value: float | None = None,
            rank: int | None = None, device: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "name": _PREFIX + name, "rank": rank, "shape": shape,
            "dtype": None if value is None else "float32", "device": device, "wall_ms": wall_ms,
            "statistics": None if value is None else _statistics(float(value))}


def _statistics(value: float) -> dict[str, Any]:
    return {"numel": 1, "finite_count": int(math.isfinite(value)), "minimum": value, "maximum": value,
            "mean": value, "l2_norm": abs(value)}


def _iterations(records: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["iteration"], []).append(record)
    return [groups[iteration] for iteration in sorted(groups)]


def _names(ranks: int) -> list[dict[str, Any]]:
    threads = ["all ranks", *(f"rank {rank}" for rank in range(ranks))]
    named = [("process_name", 0, FRAMEWORK), *(("thread_name", thread, name) for thread, name in enumerate(threads))]
    return [{"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}} for kind, thread, name in named]


def _step_events(records: Sequence[dict[str, Any]], start_us: float) -> list[dict[str, Any]]:
    events, stage_start_us = [], start_us
    for stage in ("step", *_STAGES):
        matching = [record for record in records if record["name"] == _PREFIX + stage]
        known = [record for record in matching if record["wall_ms"] is not None]
        at = start_us if stage == "step" else stage_start_us
        events += [_event(record, at) for record in known]
        if stage != "step":
            stage_start_us += 1e3 * max((_wall_ms(record) for record in known), default=0.0)
    return events


def _event(record: dict[str, Any], start_us: float) -> dict[str, Any]:
    rank = record["rank"]
    arguments = {name: record[name] for name in ("iteration", "device", "shape", "dtype", "statistics")}
    return {"name": record["name"], "cat": record["kind"], "ph": "X", "pid": 0,
            "tid": 0 if rank is None else 1 + rank, "ts": start_us, "dur": 1e3 * _wall_ms(record), "args": arguments}


def _wall_ms(record: dict[str, Any]) -> float:
    return record["wall_ms"] or 0.0
