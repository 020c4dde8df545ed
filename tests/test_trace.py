from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from jaxdp.errors import DataError
from jaxdp.runs import strict_json
from jaxdp.runs.trace import export, step_records
from jaxdp.training.metrics import StepMetrics

FIELDS = ["schema_version", "framework", "run_id", "phase", "iteration", "kind", "name", "rank", "shape", "dtype",
          "device", "wall_ms", "statistics"]


def metrics(step: int, **changes: Any) -> StepMetrics:
    plain = StepMetrics(
        step=step, loss=2.0, rank_losses=(1.5, 2.5), tokens=8, rank_tokens=(4, 4), learning_rate=1e-3,
        gradient_norm=1.0, bucket_count=1, parameter_count=12, element_count=728, forward_backward_ms=4.0,
        communication_ms=2.0, optimizer_ms=1.0, verification_ms=0.5, total_ms=8.0, parameter_check="ok",
        maximum_parameter_difference=0.0, gradient_digest="0" * 64, parameter_digest="1" * 64, peak_device_bytes=None)
    return dataclasses.replace(plain, **changes)


def records(step: int, **changes: Any) -> list[dict[str, Any]]:
    return step_records(metrics(step, **changes), run_id="r", phase="train", devices=["cpu:0", "cpu:1"])


def write(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text("".join(strict_json.dumps(entry | {"sequence": number}) + "\n"
                            for number, entry in enumerate(entries)))


def test_a_step_has_one_record_a_stage_and_rank_with_every_field() -> None:
    entries = records(3)
    assert [(entry["name"], entry["rank"], entry["device"]) for entry in entries] == [
        ("data_parallel.forward_backward", 0, "cpu:0"), ("data_parallel.forward_backward", 1, "cpu:1"),
        ("data_parallel.all_reduce", None, None), ("data_parallel.optimizer", None, None),
        ("data_parallel.verification", None, None), ("data_parallel.step", None, None)]
    assert all(sorted(entry) == sorted(FIELDS) for entry in entries)
    assert [entry["wall_ms"] for entry in entries] == [4.0, 4.0, 2.0, 1.0, 0.5, 8.0]


def test_statistics_say_how_much_of_a_value_is_finite() -> None:
    entries = records(1, rank_losses=(math.nan, None), loss=math.nan)
    assert entries[0]["statistics"]["finite_count"] == 0
    assert math.isnan(entries[0]["statistics"]["mean"])
    assert entries[1]["statistics"] is None  # a rank without a token has no loss
    assert '"mean": "NaN"' in strict_json.dumps(entries[0])


def test_a_time_that_is_not_known_is_never_zero() -> None:
    entries = records(1, forward_backward_ms=None, communication_ms=None, optimizer_ms=None)
    assert [entry["wall_ms"] for entry in entries] == [None, None, None, None, 0.5, 8.0]


def test_exported_stages_lie_inside_their_step_one_after_another(tmp_path: Path) -> None:
    write(tmp_path / "trace.jsonl", records(1) + records(2))
    events = [event for event in export(tmp_path)["traceEvents"] if event["ph"] == "X"]
    for iteration, start_us in ((1, 0.0), (2, 8000.0)):
        spans = {(event["name"].removeprefix("data_parallel."), event["tid"]): (event["ts"], event["ts"] + event["dur"])
                 for event in events if event["args"]["iteration"] == iteration}
        assert spans == {("step", 0): (start_us, start_us + 8000), ("forward_backward", 1): (start_us, start_us + 4000),
                         ("forward_backward", 2): (start_us, start_us + 4000),
                         ("all_reduce", 0): (start_us + 4000, start_us + 6000),
                         ("optimizer", 0): (start_us + 6000, start_us + 7000),
                         ("verification", 0): (start_us + 7000, start_us + 7500)}


def test_an_exported_stage_of_unknown_duration_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "trace.jsonl", records(1, communication_ms=None))
    exported = export(tmp_path / "trace.jsonl")["traceEvents"]
    assert "data_parallel.all_reduce" not in {event["name"] for event in exported}
    assert {event["args"]["name"] for event in exported if event["ph"] == "M"} == {"jaxdp", "all ranks", "rank 0",
                                                                                "rank 1"}


def test_a_folder_without_a_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"trace\.jsonl holds no trace records"):
        export(tmp_path)
