"""`jaxdp launch -- train` end to end, on CPU with the tiny model."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jaxdp.cli import main
from jaxdp.runs import strict_json
from multiprocess.launched import launched_training

REFERENCE_STEPS = 150

Digests = list[tuple[int, str]]


def digests(run: Path) -> Digests:
    return [(record["step"], record["parameter_digest"]) for record in strict_json.read_records(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Of one process with four devices, shards as in every run here."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["train", "--model", "tiny", "--platform", "cpu", "--shards", "4", "--seed", "5", "--devices", "4",
                 "--json", "--steps", str(REFERENCE_STEPS), "--output", str(output)]) == 0
    return digests(output)


def test_four_ranks_have_the_bits_of_one_process(undisturbed: Digests, tmp_path: Path) -> None:
    with launched_training(tmp_path, 4, "--steps", 3, "--output", "run") as launch:
        assert launch.finish(0, 100) == []
        assert len(launch.out.splitlines()) == 3
        assert digests(tmp_path / "run") == undisturbed[:3]


@pytest.mark.timeout(240)  # two runs of two processes
def test_sigterm_leaves_a_checkpoint_from_which_a_resume_has_the_undisturbed_bits(undisturbed: Digests,
                                                                                 tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    with launched_training(tmp_path, 2, "--steps", 10**6, "--output", "run") as launch:
        launch.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, 60)
        launch.send(signal.SIGTERM)
        assert "go on by --resume auto" in launch.finish(143, 30)[-1]
    last = digests(tmp_path / "run")[-1][0]
    assert last + 2 <= REFERENCE_STEPS, "the stop came late: make the reference longer"
    with launched_training(tmp_path, 2, "--steps", last + 2, "--output", "run", "--resume", "auto") as launch:
        launch.finish(0, 60)
    assert digests(tmp_path / "run") == undisturbed[:last + 2]


def test_a_rank_killed_in_mid_run_is_the_first_cause_and_its_peer_the_consequence(tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    with launched_training(tmp_path, 2, "--steps", 10**6, "--output", "run") as launch:
        launch.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, 60)
        os.kill(launch.child(1), signal.SIGKILL)
        first, second = launch.finish(1, 20)
        assert first.startswith("jaxdp launch: rank 1 was killed by SIGKILL at step ")
        assert second.startswith("jaxdp launch: then rank 0: ")
        assert "rank 1, whose process has died" in second
        assert launch.members() == []
    manifest = strict_json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    assert (manifest["status"], manifest["returncode"]) == ("failed", 1)


def test_what_all_ranks_refuse_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"\1\2")
    with launched_training(tmp_path, 2, "--steps", 3, "--data", "short.txt") as launch:
        (line,) = launch.finish(2, 60)
        assert "refused: " in line
        assert "short.txt" in line
        assert launch.out == ""
        assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []
