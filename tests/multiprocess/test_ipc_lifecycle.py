"""Making and closing communicators: nothing is read after it is freed, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_bits_equal

from jaxdp.collectives import ipc
from jaxdp.errors import CollectiveTimeout, CommunicatorClosed, PeerFailure, StagingError
from multiprocess.member import ONE_SHOT, TWO_SHOT, Member
from multiprocess.ranks import Ranks, shared_memory_in_use
from multiprocess.test_ipc_failures import LONG_S, ONES, expect_failure


def check_close_during_use(one_shot_bytes: int) -> None:
    """Rank 0 closes as soon as its own 64 MiB are done, while rank 1 is held in the middle of its call."""
    member = Member(one_shot_bytes=one_shot_bytes, staging_bytes=1 << 20, timeout_s=LONG_S)
    x = np.full(16 << 20, 1.0 + member.rank, np.float32)
    member.barrier()
    result = member.all_reduce(x)[0]
    if member.rank == 1:
        time.sleep(1.0)
        assert_bits_equal(result, np.full(16 << 20, 3.0, np.float32))
    begin = time.monotonic()
    member.close()
    if member.rank == 0:
        assert time.monotonic() - begin > 0.5, "rank 0 did not wait for rank 1's acknowledgement"
    member.close()
    expect_failure(CommunicatorClosed, "was closed; create a new one", lambda: member.all_reduce(ONES), within_s=10.0)


@pytest.mark.parametrize("one_shot_bytes", [ONE_SHOT, TWO_SHOT])
def test_close_waits_for_a_held_peer_whose_result_is_exact(ranks: Ranks, one_shot_bytes: int) -> None:
    ranks.run("test_ipc_lifecycle:check_close_during_use", 2, one_shot_bytes=one_shot_bytes)


def check_close_without_peer() -> None:
    member = Member(timeout_s=0.5)
    member.all_reduce(ONES)
    if member.rank == 0:
        expect_failure(CollectiveTimeout, r"closing the communicator: rank 0 waited 0\.5 s for rank 1",
                       member.close, within_s=1.5)
    else:
        time.sleep(1.0)


def test_close_gives_up_at_the_deadline(ranks: Ranks) -> None:
    ranks.run("test_ipc_lifecycle:check_close_without_peer", 2)


def check_close_after_death() -> None:
    member = Member(timeout_s=LONG_S)
    member.all_reduce(ONES)
    if member.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_failure(PeerFailure, "closing the communicator: rank 0 waited for rank 1, whose process has died",
                   member.close, within_s=10.0)


def test_close_does_not_wait_for_the_dead(ranks: Ranks) -> None:
    ranks.run("test_ipc_lifecycle:check_close_after_death", 2, expect=[0, -signal.SIGKILL])


def mapped_and_open() -> tuple[int, int, int]:
    """Resident KiB, open descriptors and threads of this process."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["VmRSS"].split()[0]), len(os.listdir("/proc/self/fd")), int(fields["Threads"])


def check_rounds() -> None:
    def use_once() -> None:
        member = Member(staging_bytes=1 << 20)
        assert member.all_reduce(np.ones(500_000, np.float32))[0][-1] == member.world
        member.close()

    use_once()
    before = mapped_and_open()
    for _ in range(50):
        use_once()
    after = mapped_and_open()
    assert after[1:] == before[1:], f"(descriptors, threads) were {before[1:]}, are {after[1:]}"
    assert after[0] - before[0] < 2048, f"resident memory went from {before[0]} to {after[0]} KiB"


def test_fifty_rounds_leave_memory_descriptors_threads_and_dev_shm_as_they_were(ranks: Ranks, tmp_path: Path) -> None:
    names, used = set(os.listdir("/dev/shm")), shared_memory_in_use()
    ranks.run("test_ipc_lifecycle:check_rounds", 2, rendezvous=tmp_path / "here")
    assert set(os.listdir("/dev/shm")) == names
    assert shared_memory_in_use() - used < 1 << 20
    assert not (tmp_path / "here").exists()


def wait_to_be_killed(made: str) -> None:
    member = Member(staging_bytes=8 << 20)
    Path(f"{made}-{member.rank}").touch()
    time.sleep(60)


def test_killing_every_rank_gives_shared_memory_back_at_once(ranks: Ranks, tmp_path: Path) -> None:
    names, used = set(os.listdir("/dev/shm")), shared_memory_in_use()
    pids = ranks.start("test_ipc_lifecycle:wait_to_be_killed", 2, made=str(tmp_path / "made"))
    while len(list(tmp_path.glob("made-*"))) < 2:
        time.sleep(0.01)
    assert shared_memory_in_use() - used >= 32 << 20
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ranks.finish(expect=-signal.SIGKILL)
    assert set(os.listdir("/dev/shm")) == names
    assert shared_memory_in_use() - used < 1 << 20


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with room for one rank's 2 MiB of staging and not for two."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def check_no_room(folder: str) -> None:
    """One rank finds no room and says how much was asked for and is free; its peer repeats it."""
    with pytest.raises((StagingError, PeerFailure)) as caught:
        Member(staging_bytes=1 << 20, shared_memory=Path(folder), timeout_s=LONG_S)
    pattern = rf"{folder} has no room .*: \d{{7}} bytes asked for, \d+ free of 3145728\. .*--shm-size"
    assert re.search(pattern, str(caught.value)), caught.value
    Path(folder, f"{caught.type.__name__}-{os.environ['RANK']}").touch()


def test_too_small_shared_memory_is_named_on_all_ranks_and_left_empty(ranks: Ranks, small_memory: Path) -> None:
    ranks.run("test_ipc_lifecycle:check_no_room", 2, folder=str(small_memory), timeout_s=10.0)
    outcomes = sorted(path.name.split("-")[0] for path in small_memory.iterdir())
    assert outcomes in (["PeerFailure", "StagingError"], ["StagingError", "StagingError"])
    assert os.statvfs(small_memory).f_bfree == os.statvfs(small_memory).f_blocks


def test_a_folder_that_cannot_hold_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match="nowhere cannot hold shared memory"):
        ipc.allocate(tmp_path / "nowhere", 4096)


def check_next_run() -> None:
    member = Member()
    member.all_reduce(ONES)
    member.close()


def start_and_stay() -> None:
    """Never ends by itself, so that the kill meets it however quick its start was."""
    Member()
    time.sleep(60)


def test_a_run_killed_at_its_start_is_no_obstacle_for_the_next_ones(ranks: Ranks, tmp_path: Path) -> None:
    for delay_s in (0.0, 0.02, 0.05):
        pids = ranks.start("test_ipc_lifecycle:start_and_stay", 2, rendezvous=tmp_path / "same")
        time.sleep(delay_s)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ranks.finish(expect=-signal.SIGKILL)
    for world in (2, 4):
        ranks.run("test_ipc_lifecycle:check_next_run", world, rendezvous=tmp_path / "same", timeout_s=10.0)
    assert not (tmp_path / "same").exists()


def leave_without_closing() -> None:
    member = Member()
    member.all_reduce(ONES)


def test_a_rank_that_ends_without_closing_says_nothing(ranks: Ranks) -> None:
    assert ranks.run("test_ipc_lifecycle:leave_without_closing", 2) == ["", ""]
