"""The launcher with ranks that are small scripts: how a group begins, fails and ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from multiprocess.launched import launched_script

WAIT = "ready(); time.sleep(100)"


def test_rank_0_speaks_on_stdout_and_all_others_behind_their_prefix(tmp_path: Path) -> None:
    with launched_script(tmp_path, 2, 'print(f"out {rank}"); sys.stderr.write(f"err {rank}"); done()') as launch:
        lines = launch.finish(0, 30)
        assert launch.out == "out 0\n"
        assert sorted(lines) == ["rank 0: err 0", "rank 1: err 1", "rank 1: out 1"]


def test_ranks_are_told_who_they_are_whatever_the_shell_has_left(tmp_path: Path) -> None:
    body = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "XLA_FLAGS")
import json; json.dump({**{name: os.environ[name] for name in names}, "meet": os.environ["JAXDP_RENDEZVOUS"],
                        "inherits": recorder.RECORDER_VARIABLE in os.environ}, open(f"{rank}.json", "w")); done()
"""
    left = {"RANK": "7", "WORLD_SIZE": "3", "LOCAL_RANK": "x", "JAXDP_RENDEZVOUS": "old", "SLURM_PROCID": "5",
            "OMPI_COMM_WORLD_RANK": "3", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    with launched_script(tmp_path, 2, body, environment=left) as launch:
        launch.finish(0, 30)
        said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    meet = said[0]["meet"]
    assert Path(meet).is_relative_to(tmp_path / "tmp")
    assert said == [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "meet": meet,
                     "XLA_FLAGS": "--xla_force_host_platform_device_count=1", "inherits": False} for rank in "01"]


def test_a_killed_rank_is_named_and_ends_the_group_even_one_that_ignores_sigterm(tmp_path: Path) -> None:
    body = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "100"])
{WAIT}"""
    with launched_script(tmp_path, 2, body) as launch:
        launch.pid(0)
        os.kill(launch.pid(1), signal.SIGKILL)
        lines = launch.finish(1, 15)
        assert lines == ["jaxdp launch: rank 1 was killed by SIGKILL at step 7, phase update."]
        assert launch.members() == []


def test_what_peers_say_of_a_failure_comes_after_its_cause(tmp_path: Path) -> None:
    body = """
if rank == 0:
    recorder.note_failure("lost a peer.", consequence=True)
    print("noise of a consequence", file=sys.stderr, flush=True)
    sys.exit(1)
ready(); time.sleep(1)
recorder.note_failure("ValueError: boom", consequence=False)
print("the traceback", file=sys.stderr); sys.exit(1)
"""
    with launched_script(tmp_path, 2, body) as launch:
        assert launch.finish(1, 15) == [
            "jaxdp launch: rank 1 failed (exit 1) at step 7, phase update: ValueError: boom", "rank 1: the traceback",
            "jaxdp launch: then rank 0: lost a peer."]


def test_a_rank_that_exits_0_early_fails_the_group(tmp_path: Path) -> None:
    with launched_script(tmp_path, 2, f"sys.exit(0) if rank else None\n{WAIT}") as launch:
        assert launch.finish(1, 15) == [
            "jaxdp launch: rank 1 exited with 0 before the run was done, at step 7, phase update."]


def test_a_stopped_rank_is_found_and_named(tmp_path: Path) -> None:
    with launched_script(tmp_path, 2, "while not ready(): recorder.note('update'); time.sleep(0.1)",
                         timeout_s=1.5) as launch:
        launch.pid(0)
        os.kill(launch.pid(1), signal.SIGSTOP)
        (line,) = launch.finish(1, 15)
        assert line.startswith("jaxdp launch: rank 1 made no progress for")
        assert "it is stopped (SIGSTOP, or a debugger); it is at step 7, phase update." in line
        assert launch.members() == []


def test_a_rank_that_hangs_in_python_is_named_with_its_stacks(tmp_path: Path) -> None:
    body = """
def hang_here(): time.sleep(100)
recorder.note("record") if rank == 0 else hang_here()
time.sleep(100)
"""
    with launched_script(tmp_path, 2, body, timeout_s=1.5) as launch:
        first, *stacks = launch.finish(1, 15)
        assert first.startswith("jaxdp launch: rank 1 made no progress for")
        assert [line for line in stacks if line.startswith("rank 1: ") and "in hang_here" in line] != []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_goes_to_rank_0_which_decides(number: int, tmp_path: Path) -> None:
    body = f"""
stop = []
signal.signal({number}, lambda *_: stop.append(1))
ready()
while not (os.path.exists("stop") or stop): time.sleep(0.02)
if rank == 0: open("stop", "w").close()
done({128 + number} if stop or rank else 1)
"""
    with launched_script(tmp_path, 2, body) as launch:
        launch.wait_until_ready()
        launch.send(number)
        assert launch.finish(128 + number, 15) == []


def test_many_ctrl_c_end_the_group_and_skip_no_cleaning(tmp_path: Path) -> None:
    body = f"""
seen = []
def note(*_):
    seen.append(1); open(f"seen-{{len(seen)}}", "w").close()
signal.signal(signal.SIGINT, note)
{WAIT}"""
    with launched_script(tmp_path, 2, body) as launch:
        launch.wait_until_ready()
        for count in (1, 2):  # rank 0 takes no notice
            launch.send(signal.SIGINT)
            launch.wait_for((tmp_path / f"seen-{count}").exists, 10)
        launch.send(signal.SIGINT)
        (line,) = launch.finish(1, 15)
        assert "rank 0 was killed by the launcher, which was asked to end" in line
        assert launch.members() == []


def test_a_killed_launcher_leaves_no_process_and_the_next_one_its_folder(tmp_path: Path) -> None:
    with launched_script(tmp_path, 2, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAIT}") as launch:
        launch.wait_until_ready()
        launch.send(signal.SIGKILL)
        launch.process.wait(5)
        deadline = time.monotonic() + 5
        while launch.members() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert launch.members() == []
    with launched_script(tmp_path, 1, "done()") as launch:
        launch.finish(0, 30)
