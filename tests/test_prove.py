from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdp.cli import main
from jaxdp.errors import JaxdpError
from jaxdp.runs.checkpoint import State
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.flags import parse
from jaxdp.tools import prove, prove_report, trails
from jaxdp.tools.matrix import Cell, Trail, first_difference, idle_field, plan, references
from jaxdp.tools.prove_report import Outcome, all_agree
from jaxdp.training.trainer import DataParallelTrainer

Capture = pytest.CaptureFixture[str]


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step, "rank_losses": [1.0], "gradient_digest": f"g{step}",
            "parameter_digest": f"p{step}"} | changes


def trail(*records: dict[str, Any], weights: Any = (1.0, 2.0), cursor: int = 8) -> Trail:
    tensors = {"parameters/w": np.array(weights, np.float32)}
    return Trail(records or (record(1), record(2)), State(2, tensors, {"samples": cursor}, {}))


def outcome(cell: Cell, reference: str | None, difference: str | None = None) -> Outcome:
    last = record(2, loss=2.123456789, gradient_digest="0" * 64, parameter_digest="1" * 64)
    return Outcome(cell, reference, (record(1), last), "0" * 64, difference)


def outcomes(**differences: str) -> list[Outcome]:
    """Of the whole plan, with differences by name of cell."""
    cells = plan((1, 2, 4, 8), ranked=True)
    first = references(cells)
    return [outcome(cell, None if cell == first[cell.group] else first[cell.group].name, differences.get(cell.name))
            for cell in cells]


# The plan


def test_shards_promise_every_world_size_bucket_transport_stop_and_processes() -> None:
    cells = [cell for cell in plan((1, 2, 4, 8), ranked=True) if cell.shards]
    assert all(cell.promised and cell.shards == 8 for cell in cells)
    assert len({cell.group for cell in cells}) == 1
    assert [cell.world for cell in cells[:4]] == [1, 2, 4, 8]
    assert {cell.transport for cell in cells} == {"auto", "xla"}
    assert min(cell.bucket_bytes for cell in cells) == 1
    assert {(cell.world, cell.then) for cell in cells if cell.then} == {(8, 1)}
    assert [cell.world for cell in cells if cell.ranked] == [2]


def test_psum_another_step_mode_and_another_world_without_shards_promise_nothing() -> None:
    cells = [cell for cell in plan((1, 4), ranked=False) if not cell.shards]
    assert {(cell.step_mode, cell.world, cell.reducer): cell.promised for cell in cells} == {
        ("fused", 4, "tree"): True, ("fused", 1, "tree"): False, ("staged", 4, "tree"): False,
        ("fused", 4, "psum"): False}


@pytest.mark.parametrize("worlds", [(1,), (2,), (2, 8), (1, 2, 4, 8)])
def test_every_group_has_promised_cells_to_compare(worlds: tuple[int, ...]) -> None:
    cells = plan(worlds, ranked=False)
    first = references(cells)
    for group in first:
        assert sum(cell.promised for cell in cells if cell.group == group) >= 2
        assert first[group].promised


# The comparison


def test_equal_trails_have_no_difference() -> None:
    assert first_difference(trail(), trail()) is None
    assert first_difference(trail(weights=(np.nan, 0)), trail(weights=(np.nan, 0))) is None


@pytest.mark.parametrize(("other", "named"), [
    (trail(record(1), record(2, gradient_digest="x"), weights=(9, 9)), "step 2: gradient_digest g2 and x"),
    (trail(record(1, loss=2.0), record(2, gradient_digest="x")), "step 1: loss 1.0 and 2.0"),
    (trail(record(1)), r"steps \[1, 2\] and \[1\]"),
    (trail(weights=(1.0, np.nextafter(np.float32(2), np.float32(3)))), r"parameters/w at \[1\].*0x40000001"),
    (trail(weights=(1.0, 2.0), cursor=9), "data cursor"),
])
def test_the_first_difference_is_named(other: Trail, named: str) -> None:
    found = first_difference(trail(), other)
    assert found is not None
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(found)


def test_a_training_that_does_not_move_proves_nothing() -> None:
    assert idle_field(trail()) is None
    assert idle_field(trail(record(1), record(2, parameter_digest="p1"))) == "parameter_digest"


def test_only_promised_cells_decide() -> None:
    assert all_agree(outcomes())
    assert all_agree(outcomes(staged="step 1", **{"fused, psum": "step 1"}))
    for name in ("world 8", "world 8, stop, world 1", "fused, small buckets", "fused"):
        assert not all_agree(outcomes(**{name: "step 1"}))


def test_a_group_with_one_cell_is_no_proof() -> None:
    assert not all_agree([found for found in outcomes() if found.cell.name != "fused, small buckets"])


def test_the_table_fits_80_columns_and_the_first_broken_promise_comes_first(capfd: Capture) -> None:
    prove_report.write(outcomes(**{"world 4": "step 2: loss 1 and 2", "fused, psum": "step 1"}), as_json=False)
    lines = capfd.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    text = "\n".join(lines)
    for words in ("world 8, stop, world 1", "fused, small buckets", "DIFFERS", "differs, no promise", "equal"):
        assert words in text
    assert lines[-2:] == ["8 shards: world 4 differs from world 1: step 2: loss 1 and 2",
                          "1 of 10 promised cells differ"]


# Trainings


def run_prove(monkeypatch: pytest.MonkeyPatch, capfd: Capture, *names: str) -> tuple[int, dict[str, Any]]:
    """`jaxdp prove` at world 1 and 2 over the cells of these names alone."""
    cells = [cell for cell in plan((1, 2), ranked=False) if cell.name in names]
    monkeypatch.setattr(prove, "plan", lambda worlds, ranked: cells)
    code = main(["prove", "--platform", "cpu", "--worlds", "1", "2", "--steps", "2", "--batch", "1", "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_real_trainings_agree_over_worlds_transports_and_a_stop(monkeypatch: pytest.MonkeyPatch,
                                                                capfd: Capture) -> None:
    names = ("world 1", "world 2, transport xla", "world 2, stop, world 1")
    made: list[tuple[int, str]] = []
    close = DataParallelTrainer.close

    def note_and_close(trainer: DataParallelTrainer) -> None:
        assert trainer.capabilities is not None
        made.append((trainer.world_size, trainer.capabilities.transport))
        close(trainer)

    monkeypatch.setattr(DataParallelTrainer, "close", note_and_close)
    code, found = run_prove(monkeypatch, capfd, *names)
    assert (code, found["agree"]) == (0, True)
    assert [cell["name"] for cell in found["cells"]] == list(names)
    assert made == [(1, "local"), (2, "xla"), (2, "local"), (1, "local")]
    assert len({cell["state_sha256"] for cell in found["cells"]}) == 1
    assert len({json.dumps(cell["steps"]) for cell in found["cells"]}) == 1


def test_one_parameter_one_ulp_off_at_one_world_size_is_found(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    step = DataParallelTrainer.step

    def nudge(trainer: DataParallelTrainer, batches: Any, number: int) -> Any:
        if (trainer.world_size, number) == (2, 2):
            tensors = trainer.state_tensors()
            weight = tensors["parameters/output_head"]
            weight.flat[0] = np.nextafter(weight.flat[0], np.float32(np.inf))
            trainer.load_state_tensors(tensors, number - 1)
        return step(trainer, batches, number)

    monkeypatch.setattr(DataParallelTrainer, "step", nudge)
    code, found = run_prove(monkeypatch, capfd, "world 1", "world 2")
    assert (code, found["agree"]) == (1, False)
    assert found["closing"][0].startswith("2 shards: world 2 differs from world 1: step 2: ")


def test_ranks_are_launched_with_the_flags_of_the_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (cell,) = (cell for cell in plan((1, 2), ranked=True) if cell.ranked)
    config = TrainConfig(model="tiny", steps=3, batch=2, shards=2, seed=5, platform="cpu", context=3, devices=2)
    commands: list[list[str]] = []

    def refuse(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        del kwargs
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "one\ntwo\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(JaxdpError, match="process a rank: jaxdp launch exited 1: one | two"):
        trails.of_ranks(cell, config, tmp_path)
    words = commands[0][commands[0].index("launch"):]
    assert words[:5] == ["launch", "--nproc", "2", "--", "train"]
    expected = dataclasses.replace(config, devices=1, output=str(tmp_path), json=True)
    assert parse(TrainConfig, "train", words[5:]) == expected


@pytest.mark.parametrize(("arguments", "named"), [
    (["--worlds", "3"], "--worlds must be 1, 2, 4 or 8; got 3"), (["--worlds", "2", "1"], "--worlds must be distinct"),
    (["--steps", "1"], "--steps"), (["--model", "none"], "--model"), (["--data", "/nowhere"], "/nowhere"),
    (["--worlds", "x"], "--worlds")])
def test_bad_use_is_refused_at_once(arguments: list[str], named: str, capfd: Capture) -> None:
    assert main(["prove", "--platform", "cpu", *arguments]) == 2
    assert named in capfd.readouterr().err


def test_a_rank_of_several_proves_nothing(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main(["prove"]) == 2
    assert "unset RANK" in capfd.readouterr().err
