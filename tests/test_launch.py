"""What the launcher decides without starting anything: refusals, environments, positions, the first cause."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from jaxdp.cli import main
from jaxdp.errors import ConfigError, PeerFailure
from jaxdp.ranked import recorder
from jaxdp.ranked.group_folder import group_folder
from jaxdp.ranked.placement import rank_environment
from jaxdp.ranked.recorder import Outcome, Position, RecorderView
from jaxdp.ranked.verdict import RankEnd, exit_code, explain, first_cause
from jaxdp.runs.failure import report

Capture = pytest.CaptureFixture[str]

REFUSED = {  # arguments, and what the one sentence must name
    "no number": ([], ["--nproc", "1, 2, 4 or 8"]),
    "nproc 3": (["--nproc", "3", "--", "train"], ["--nproc", "1, 2, 4 or 8", "got 3"]),
    "nproc two": (["--nproc", "two", "--", "train"], ["--nproc", "'two'"]),
    "timeout 0": (["--nproc", "2", "--timeout", "0", "--", "train"], ["--timeout", "above 0", "got 0"]),
    "another command": (["--nproc", "2", "--", "compare", "a", "b"], ["must be train", "'compare'"]),
    "no command": (["--nproc", "2", "--"], ["must be train", "'nothing'"]),
    "no dashes": (["--nproc", "2", "train"], ["-- must stand before train"]),
    "devices": (["--nproc", "2", "--", "train", "--devices", "1"], ["--devices", "left out"]),
    "devices by =": (["--nproc", "2", "--", "train", "--devices=1"], ["--devices", "left out"]),
    "a flag of train": (["--nproc", "2", "--", "train", "--stepss", "3"], ["'--stepss'", "--steps"]),
    "shards": (["--nproc", "4", "--", "train", "--shards", "2"], ["--shards", "world size (4)", "got 2"]),
    "model": (["--nproc", "2", "--", "train", "--model", "nosuch"], ["--model", "'nosuch'"]),
    "data": (["--nproc", "2", "--", "train", "--data", "absent"], ["--data", "'absent'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_use_is_one_sentence_with_nothing_started(case: str, capfd: Capture, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, words = REFUSED[case]
    assert main(["launch", *arguments]) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines()), list(tmp_path.iterdir())) == ("", 1, [])
    assert [word for word in words if word not in err] == []


def place(environ: dict[str, str], rank: int = 1, world_size: int = 2, platform: str = "cpu") -> dict[str, str]:
    return rank_environment(environ, rank, world_size, platform, rendezvous=Path("/meet"), recorder=Path("/record"))


def test_values_of_the_launch_beat_leftovers() -> None:
    left = {"RANK": "7", "LOCAL_RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "JAXDP_RENDEZVOUS": "/old",
            "SLURM_PROCID": "5", "OMPI_COMM_WORLD_RANK": "3"}
    assert place(left) == left | {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "JAXDP_RENDEZVOUS": "/meet",
        "JAXDP_FLIGHT_RECORDER": "/record", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}


def test_a_rank_on_cpu_sees_one_device_and_keeps_other_flags() -> None:
    flags = place({"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8 --b"})["XLA_FLAGS"]
    assert flags == "--a=1 --b --xla_force_host_platform_device_count=1"


@pytest.mark.parametrize(("platform", "environ", "chosen"), [
    ("cpu", {"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "4,5"}),
    ("cuda", {}, {"CUDA_VISIBLE_DEVICES": "1"}),
    ("cuda", {"CUDA_VISIBLE_DEVICES": "4, 6"}, {"CUDA_VISIBLE_DEVICES": "6"}),
    ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
    ("rocm", {}, {"HIP_VISIBLE_DEVICES": "1"}),
    ("rocm", {"HIP_VISIBLE_DEVICES": "3,2"}, {"HIP_VISIBLE_DEVICES": "2"}),
    ("rocm", {"CUDA_VISIBLE_DEVICES": "3,2"}, {"CUDA_VISIBLE_DEVICES": "3,2", "HIP_VISIBLE_DEVICES": "2"}),
    ("rocm", {"ROCR_VISIBLE_DEVICES": "6,7"}, {"ROCR_VISIBLE_DEVICES": "6,7", "HIP_VISIBLE_DEVICES": "1"}),
    ("auto", {}, {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}),
    ("auto", {"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": "cpu"}),
    ("auto", {"CUDA_VISIBLE_DEVICES": "-1"}, {"CUDA_VISIBLE_DEVICES": "-1"}),
])
def test_a_rank_sees_the_device_at_its_place(platform: str, environ: dict[str, str], chosen: dict[str, str]) -> None:
    seen = place(environ, platform=platform)
    assert {name: value for name, value in seen.items() if "VISIBLE" in name or name == "JAX_PLATFORMS"} == chosen


@pytest.mark.parametrize(("platform", "name", "value"), [
    ("cuda", "CUDA_VISIBLE_DEVICES", "3"), ("cuda", "CUDA_VISIBLE_DEVICES", ""),
    ("cuda", "CUDA_VISIBLE_DEVICES", "0,-1,2"),
    ("rocm", "ROCR_VISIBLE_DEVICES", "0"), ("rocm", "HIP_VISIBLE_DEVICES", "0"), ("auto", "CUDA_VISIBLE_DEVICES", "0")])
def test_fewer_visible_devices_than_ranks_are_refused_by_name(platform: str, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a list of at least 2 devices.*got '{value}'"):
        place({name: value}, platform=platform)


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecorderView]:
    """The reading end of a recorder whose writing end is this process's."""
    seen = RecorderView(tmp_path / "rank-0.flight")
    monkeypatch.setattr(recorder, "_recorder", recorder.Recorder(seen.path))
    yield seen
    monkeypatch.undo()


def test_the_recorder_holds_step_phase_and_collective(view: RecorderView) -> None:
    assert (view.read().count, view.read().phase) == (0, "starting")
    recorder.note("batches", 3)
    recorder.note("update")
    recorder.note_collective("all_gather int32[1, 2]")
    position = view.read()
    assert (position.count, position.step, position.phase) == (3, 3, "update")
    assert str(position) == "step 3, phase update, last small collective all_gather int32[1, 2]"
    recorder.note("ü" * 100)
    assert view.read().phase == "ü" * 20


def test_a_note_cut_off_in_mid_write_leaves_the_one_before(view: RecorderView) -> None:
    recorder.note("batches", 3)
    memory = recorder._recorder._memory  # pyright: ignore[reportOptionalMemberAccess]
    memory[8:8 + recorder._NOTE.size] = b"\xff" * recorder._NOTE.size  # slot of note 2, not yet published
    assert (view.read().step, view.read().phase) == (3, "batches")


def test_the_first_failure_counts_and_a_peers_is_a_consequence(view: RecorderView, capfd: Capture) -> None:
    report(PeerFailure("rank 1 is gone."), "jaxdp train")
    report(ValueError("later"), "jaxdp train")
    recorder.note_done()
    assert (view.read().outcome, view.read().sentence) == (Outcome.CONSEQUENCE, "rank 1 is gone.")


def failed(rank: int, time_ns: int, sentence: str, code: int = 1, outcome: Outcome = Outcome.FAILED) -> RankEnd:
    return RankEnd(rank, code, time_ns + 5, Position(9, time_ns, 2, outcome, "update", sentence=sentence))


def killed(rank: int, time_ns: int, told: bool = False, number: int = 9) -> RankEnd:
    return RankEnd(rank, -number, time_ns, Position(9, 0, 2, phase="update"), told_to_end=told)


def done(rank: int, code: int = 0) -> RankEnd:
    return RankEnd(rank, code, 7, Position(20, 6, 4, Outcome.DONE, "save"))


def peer(rank: int, time_ns: int) -> RankEnd:
    return failed(rank, time_ns, f"rank {rank} lost its peer.", outcome=Outcome.CONSEQUENCE)


GONE = RankEnd(1, 0, 50, Position(9, 1, 2, phase="update"))
STUCK = RankEnd(1, -9, 90, Position(8, 1, 2, phase="update"), told_to_end=True, stuck="made no progress for 4 s")
CAUSES: dict[str, tuple[Sequence[RankEnd], int | None, int, list[str]]] = {
    "all done": ([done(0), done(1)], None, 0, []),
    "stopped": ([done(0, 143), done(1, 143)], None, 143, []),
    "killed": ([peer(0, 40), killed(1, 50)], 1, 1, ["rank 1 was killed by SIGKILL", "then rank 0: rank 0 lost"]),
    "ended by us": ([killed(0, 60, told=True), killed(1, 50)], 1, 1, ["rank 1 was killed by SIGKILL"]),
    "raised": ([peer(0, 30), failed(1, 40, "ValueError: boom")], 1, 1, ["ValueError: boom", "then rank 0"]),
    "the earlier": ([failed(0, 41, "late"), failed(1, 40, "early")], 1, 1, ["early", "then rank 0: late"]),
    "refused": ([failed(r, r, "--x must be 1.", 2) for r in (0, 1)], 0, 2, ["rank 0 refused: --x must be 1."]),
    "left early": ([peer(0, 60), GONE], 1, 1, ["exited with 0 before", "then rank 0"]),
    "stuck": ([peer(0, 60), STUCK], 1, 1, ["made no progress for 4 s; it is at step 2, phase update", "then rank 0"]),
    "crash at exit": ([done(0, -11), done(1)], 0, 1, ["rank 0 was killed by SIGSEGV"]),
    "Ctrl-C": ([failed(0, 5, "interrupted.", 130), killed(1, 9, told=True)], 0, 130, ["interrupted."]),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_first_cause_comes_first(case: str) -> None:
    ends, rank, code, lines = CAUSES[case]
    cause = first_cause(ends)
    assert (None if cause is None else cause.rank) == rank
    assert exit_code(ends) == code
    told = explain(ends)
    assert len(told) == len(lines)
    assert [part for part, line in zip(lines, told, strict=True) if part not in line] == []


def test_a_launch_removes_what_dead_ones_left_and_leaves_the_living_alone(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = [tmp_path / f"jaxdp-launch-{os.getuid()}-{name}" for name in ("dead", "living", "new")]
    for folder in names:
        folder.mkdir()
    for folder in names[:2]:
        (folder / "ready").touch()
    living = os.open(names[1], os.O_RDONLY)
    fcntl.flock(living, fcntl.LOCK_EX)
    with group_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert set(tmp_path.iterdir()) == {names[1], names[2], folder}
    os.close(living)
    assert set(tmp_path.iterdir()) == {names[1], names[2]}
