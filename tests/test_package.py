from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import clean_environment, run_python

from jaxdp.errors import RunFolderError
from jaxdp.runs import environment, strict_json, summary
from jaxdp.runs.folder import new_folder
from jaxdp.runs.lock import FolderLock
from jaxdp.runs.package import RunPackage
from jaxdp.runs.records import RecordFile
from jaxdp.runs.stderr_tee import StderrTee

HOLDER = """
import sys, time, pathlib
from jaxdp.runs.lock import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]))
print("held", lock.owner.pid, flush=True)
time.sleep(60)
"""


def refuse_constant(token: str) -> None:
    raise AssertionError(f"not strict JSON: {token}")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step, "tokens": 10, "forward_backward_ms": None, "total_ms": 5.0,
            "parameter_check": "ok", "maximum_parameter_difference": 0.0, "parameter_digest": f"{step:064x}"} | changes


def begin(package: RunPackage, step: int = 0) -> None:
    package.begin(step=step, configuration={"model": "tiny"}, command=["jaxdp", "train"], devices=[], data_sha256=None)


def run_steps(folder: Path, steps: range, *, resume: bool = False) -> None:
    with RunPackage(folder, resume=resume) as package:
        begin(package, steps[0] - 1)
        for step in steps:
            package.record(record(step), [{"framework": "jaxdp", "iteration": step, "name": "data_parallel.step"}])
        package.finish("completed", 0)


def steps_of(folder: Path) -> list[int]:
    return [strict(line)["step"] for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def hold(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True,
                               env=clean_environment())
    assert process.stdout is not None
    assert process.stdout.readline().startswith("held")
    return process


# Strict JSON


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_a_non_finite_number_is_text_to_any_strict_reader_and_a_number_to_ours(value: float, text: str) -> None:
    written = strict_json.dumps({"loss": value, "losses": (np.float32(value), 1.5)})
    assert strict(written) == {"loss": text, "losses": [text, 1.5]}
    restored = strict_json.restore_numbers(strict_json.loads(written))
    assert math.isnan(restored["loss"]) if math.isnan(value) else restored["loss"] == value


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
def test_the_reader_refuses_what_is_not_strict_json(token: str) -> None:
    with pytest.raises(ValueError, match=token):
        strict_json.loads(f'{{"loss": {token}}}')


def test_a_record_never_holds_a_repr_by_accident() -> None:
    with pytest.raises(TypeError, match="object cannot be written"):
        strict_json.dumps({"value": object()})


def test_an_undecodable_file_name_still_gives_valid_utf8() -> None:
    name = os.fsdecode(b"caf\xe9")
    assert strict(strict_json.encode(strict_json.dumps({"path": name, "emoji": "🌳"})).decode("utf-8")) == {
        "path": name, "emoji": "🌳"}


# Records


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert [entry["step"] for entry in strict_json.read_records(path)] == [1, 2]
    file = RecordFile(path)
    assert file.keep_only(lambda _: True) == 2
    file.append({"step": 3})
    file.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_record_is_visible_before_the_run_ends(tmp_path: Path) -> None:
    with RunPackage(tmp_path, resume=False) as package:
        begin(package)
        package.record(record(1), [])
        assert steps_of(tmp_path) == [1]
        assert strict((tmp_path / "manifest.json").read_text())["status"] == "running"


# The package


def test_a_finished_run_has_every_file_and_every_field(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 4))
    written = strict((tmp_path / "manifest.json").read_text("utf-8"))
    assert list(written) == ["schema_version", "created_utc", "status", "repository", "host", "packages", "devices",
                             "configuration", "environment", "command", "data_sha256", "returncode", "artifacts"]
    assert (written["status"], written["returncode"]) == ("completed", 0)
    assert written["created_utc"].endswith("+00:00")
    assert set(written["repository"]) == {"commit", "branch", "dirty"}
    assert set(written["artifacts"]) == {"metrics.jsonl", "trace.jsonl", "stderr.txt", "summary.json"}
    assert steps_of(tmp_path) == [1, 2, 3]
    assert [entry["sequence"] for entry in strict_json.read_records(tmp_path / "trace.jsonl")] == [0, 1, 2]


def test_after_a_resume_each_step_has_exactly_one_record(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "lo')
    run_steps(tmp_path, range(4, 8), resume=True)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert [entry["sequence"] for entry in strict_json.read_records(tmp_path / "trace.jsonl")] == list(range(7))
    assert strict((tmp_path / "manifest-1.json").read_text())["status"] == "completed"


def test_stderr_is_kept_native_writes_and_a_child_of_a_killed_run_included(tmp_path: Path) -> None:
    code = """
import os, pathlib, signal, sys
from jaxdp.runs.stderr_tee import StderrTee
tee = StderrTee(pathlib.Path(sys.argv[1]))
sys.stderr.write("from Python é\\n")
os.write(2, b"from native code\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_python(code, tmp_path / "stderr.txt", check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == (tmp_path / "stderr.txt").read_text("utf-8") == "from Python é\nfrom native code\n"


def test_the_tee_puts_stderr_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tee = StderrTee(tmp_path / "stderr.txt")
    os.write(2, b"inside\n")
    tee.close()
    tee.close()
    os.write(2, b"outside\n")
    assert (tmp_path / "stderr.txt").read_text() == "inside\n"
    assert capfd.readouterr().err == "inside\noutside\n"


# The folder


def test_a_folder_that_holds_a_run_is_refused_naming_resume_auto(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 3))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RunFolderError, match="--resume auto"):
        RunPackage(tmp_path, resume=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_whose_run_never_finished_a_step_is_free(tmp_path: Path) -> None:
    with RunPackage(tmp_path, resume=False) as package:
        begin(package)
    run_steps(tmp_path, range(1, 2))
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize("name", ["/proc/x", "file", "file/below"])
def test_an_unusable_folder_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFolderError, match="cannot be used"):
        RunPackage(tmp_path / name, resume=False)


@pytest.mark.parametrize("name", ["Übung 数据 1", "trailing space ", 'quotes " and \'', "🌳", "-dash"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    run_steps(tmp_path / name, range(1, 2))
    assert steps_of(tmp_path / name) == [1]
    assert name in os.listdir(tmp_path)


def test_a_default_folder_is_never_shared(tmp_path: Path) -> None:
    assert len({new_folder(tmp_path, "my.module:model") for _ in range(3)}) == 3


def test_a_live_owner_is_named_and_left_alone(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        with pytest.raises(RunFolderError, match=f"process {holder.pid} on "):
            RunPackage(tmp_path, resume=True)
    finally:
        holder.kill()
        holder.communicate()


def test_a_dead_owners_lock_is_taken_over_and_told(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    holder.kill()
    holder.communicate()
    with RunPackage(tmp_path, resume=False) as package:
        assert package.previous_owner is not None
        assert package.previous_owner.pid == holder.pid
    with RunPackage(tmp_path, resume=False) as package:
        assert package.previous_owner is None  # released in good order


def test_of_two_launches_at_one_instant_one_gets_the_folder(tmp_path: Path) -> None:
    barrier, outcomes = threading.Barrier(8), []

    def launch() -> None:
        barrier.wait()
        try:
            outcomes.append(FolderLock(tmp_path))
        except RunFolderError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if isinstance(outcome, FolderLock)]
    assert len(winners) == 1
    assert all(str(winners[0].owner) in str(outcome) for outcome in outcomes if outcome is not winners[0])
    winners[0].release()


def test_a_trace_elsewhere_never_overwrites_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    for resume in (False, True):
        with pytest.raises(RunFolderError, match=r"notes\.txt"):
            RunPackage(tmp_path / "run", resume=resume, trace=tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


# The summary


def test_medians_and_speed_leave_out_the_steps_that_compile() -> None:
    records = [record(1, total_ms=900.0, compile_ms=2000.0), record(2, total_ms=4.0, compile_ms=None),
               record(3, total_ms=6.0, compile_ms=None), record(4, total_ms=700.0, compile_ms=1000.0)]
    result = summary.summarize(records, status="completed", checkpoints=[])
    assert result["medians"] == {"forward_backward_ms": None, "total_ms": 5.0}
    assert result["compile_ms"] == 3000.0
    assert result["tokens_per_s"] == 2000.0
    assert (result["steps"], result["initial_loss"], result["final_loss"]) == (4, 1.0, 0.25)


def test_one_bad_step_does_not_spoil_the_others_and_a_skipped_check_is_no_pass() -> None:
    records = [record(1), record(2, loss="NaN", parameter_check="skipped", maximum_parameter_difference=None),
               record(3, loss="Infinity"), record(4, loss=0.5)]
    result = summary.summarize(records, status="completed", checkpoints=[])
    assert result["final_loss"] == 0.5
    assert result["parameter_checks"] == {"ok": 3, "mismatch": 0, "skipped": 1}
    assert result["maximum_parameter_difference"] == 0.0


def test_a_run_of_no_steps_has_a_summary_of_nothing() -> None:
    result = summary.summarize([], status="failed", checkpoints=[])
    assert (result["steps"], result["final_loss"], result["tokens_per_s"]) == (0, None, None)


def test_the_environment_is_what_steers_a_run_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("API_TOKEN", "secret")
    assert environment.variables()["NCCL_DEBUG"] == "INFO"
    assert "API_TOKEN" not in environment.variables()
