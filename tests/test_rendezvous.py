"""Ranks meet in a folder; what dead runs left in it is harmless, and what live ones hold is not taken.

Ranks are threads here: a place belongs to a rank, and all that a rendezvous knows of a process is its
pid and start time. Real processes meet in tests/multiprocess.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxdp.errors import CollectiveTimeout, JaxdpError, PeerFailure, RendezvousError
from jaxdp.ranked import rendezvous
from jaxdp.ranked.context import RankContext
from jaxdp.ranked.process import Process
from jaxdp.ranked.records import exclusive, read_record, write_record
from jaxdp.ranked.rendezvous import Rendezvous


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def other_process() -> Iterator[Process]:
    """A live process that is not this one."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process_of(child.pid)
    child.kill()
    child.communicate()


def process_of(pid: int) -> Process:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process(pid, int(fields[19]))


def dead_process() -> Process:
    """A process that has ended: its pid may be free, or have another start time."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = process_of(child.pid)
    child.wait()
    return process


def context(folder: Path, rank: int, world_size: int) -> RankContext:
    return RankContext(rank, rank, world_size, folder)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Runs all at once and returns results, or the jaxdp error that one raised, in order."""
    def outcome(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except JaxdpError as error:
            return error

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(outcome, functions))


def meet(folder: Path, world_size: int, timeout_s: float = 10.0) -> list[Rendezvous]:
    return in_threads(*(lambda rank=rank: Rendezvous(context(folder, rank, world_size), timeout_s)
                        for rank in range(world_size)))


def late(folder: Path, rank: int) -> Rendezvous:
    """One of two ranks, after its peer has waited for a while."""
    time.sleep(0.2)
    return Rendezvous(context(folder, rank, 2), 10.0)


def slot(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jaxdp"


def place(folder: Path, rank: int, process: Process, nonce: int = 5, world_size: int = 2) -> Path:
    """A record of `rank`, as `process` would have written it."""
    folder.mkdir(exist_ok=True)
    write_record(slot(folder, rank), {"rank": rank, "world_size": world_size, "nonce": nonce,
                                      **dataclasses.asdict(process)})
    return slot(folder, rank)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_all_ranks_get_one_nonce_and_each_others_processes(folder: Path, world_size: int) -> None:
    members = meet(folder, world_size)
    assert len({member.nonce for member in members}) == 1
    assert 0 < members[0].nonce < 1 << 63
    assert all(member.processes == (Process.current(),) * world_size for member in members)
    for member in members:
        member.leave()
    assert not folder.exists()


def test_each_run_has_a_nonce_of_its_own(folder: Path) -> None:
    nonces = set()
    for _ in range(3):
        members = meet(folder, 2)
        nonces.add(members[0].nonce)
        for member in members:
            member.leave()
    assert len(nonces) == 3


def test_exchange_gives_every_ranks_payload_in_rank_order(folder: Path) -> None:
    members = meet(folder, 4)
    for topic in ("a", "b"):
        results = in_threads(*(functools.partial(member.exchange, topic, {"is": member.context.rank}, 10.0)
                               for member in members))
        assert results == [({"is": 0}, {"is": 1}, {"is": 2}, {"is": 3})] * 4
    members[0].forget("a")
    assert len(list(folder.glob("*-a-rank-*"))) == 3
    for member in members:
        member.leave()
    assert not folder.exists(), "the last rank takes forgotten payloads along"


def test_an_absent_rank_is_named_with_those_that_came(folder: Path) -> None:
    outcomes = in_threads(*(lambda rank=rank: Rendezvous(context(folder, rank, 4), 0.5) for rank in (0, 2)))
    for outcome in outcomes:
        assert isinstance(outcome, (CollectiveTimeout, PeerFailure))
        assert "did not come: 1, 3." in str(outcome)
    assert any(isinstance(outcome, CollectiveTimeout) and "came: 0, 2;" in str(outcome) for outcome in outcomes)
    assert not folder.exists()


def test_a_late_rank_is_waited_for(folder: Path) -> None:
    members = in_threads(lambda: late(folder, 0), lambda: Rendezvous(context(folder, 1, 2), 10.0))
    assert members[0].nonce == members[1].nonce


@pytest.mark.parametrize("nonce", [5, 0])  # 0: it died before its rank 0 came
def test_records_of_dead_processes_are_passed_over_and_cleaned(folder: Path, nonce: int) -> None:
    dead = dead_process()
    for rank in (0, 1):
        place(folder, rank, dead, nonce)
    place(folder, 3, dead, world_size=4)  # of a run with more ranks
    (folder / "0000000000000005-topic-rank-1.jaxdp").write_text("junk")
    (folder / "rank-1.jaxdp.99.tmp.jaxdp").write_text("half a temporary")
    (folder / "not ours").touch()
    members = in_threads(lambda: late(folder, 0), lambda: Rendezvous(context(folder, 1, 2), 10.0))
    assert members[0].nonce == members[1].nonce != 5
    assert sorted(path.name for path in folder.iterdir()) == ["not ours", "rank-0.jaxdp", "rank-1.jaxdp"]
    for member in members:
        member.leave()
    assert [path.name for path in folder.iterdir()] == ["not ours"]


def test_a_reused_pid_is_not_taken_for_its_former_owner(folder: Path, other_process: Process) -> None:
    for rank in (0, 1):
        place(folder, rank, dataclasses.replace(other_process, start_ticks=other_process.start_ticks - 1))
    assert len({member.nonce for member in meet(folder, 2)}) == 1


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_an_incomplete_record_is_waited_for_and_then_named(folder: Path, part: float) -> None:
    whole = place(folder, 0, Process.current()).read_bytes()
    slot(folder, 0).write_bytes(whole[:int(part * len(whole))])
    with pytest.raises(CollectiveTimeout, match=rf"did not come: 0\. .*rank-0\.jaxdp is incomplete "
                                                rf"\({int(part * len(whole))} bytes\)"):
        Rendezvous(context(folder, 1, 2), 0.2)

    members = in_threads(lambda: late(folder, 0), lambda: Rendezvous(context(folder, 1, 2), 10.0))
    assert members[0].nonce == members[1].nonce


def test_a_dead_owners_record_is_named_when_nobody_comes(folder: Path) -> None:
    place(folder, 0, dead_process())
    with pytest.raises(CollectiveTimeout, match=r"came: 1; did not come: 0\. .* is of a dead process\."):
        Rendezvous(context(folder, 1, 2), 0.2)


def test_a_live_owners_place_is_left_alone_and_the_newcomer_refuses(folder: Path, other_process: Process) -> None:
    before = {rank: place(folder, rank, other_process).read_bytes() for rank in (0, 1)}
    before[2] = place(folder, 2, other_process, world_size=4).read_bytes()
    begin = time.monotonic()
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match=rf"^rank {rank} in .* is taken by live process {other_process.pid}\. "
                                                  "Give each rank a RANK of its own, and each run"):
            Rendezvous(context(folder, rank, 2), 30.0)
    assert time.monotonic() - begin < 5.0, "a refusal does not wait for the deadline"
    assert {rank: slot(folder, rank).read_bytes() for rank in before} == before
    for path in (slot(folder, 0), slot(folder, 1)):
        path.unlink()
    for member in meet(folder, 2):
        member.leave()
    assert slot(folder, 2).read_bytes() == before[2], "a live rank of another world"


def test_of_two_processes_with_one_rank_exactly_one_is_refused(folder: Path) -> None:
    outcomes = in_threads(*(lambda: Rendezvous(context(folder, 0, 2), 1.0) for _ in range(4)))
    refused = [outcome for outcome in outcomes if isinstance(outcome, RendezvousError)]
    assert len(refused) == 3
    assert sum(isinstance(outcome, CollectiveTimeout) for outcome in outcomes) == 1


def test_ranks_with_different_world_sizes_are_refused_naming_both(folder: Path) -> None:
    outcomes = in_threads(lambda: Rendezvous(context(folder, 0, 2), 1.0),
                          lambda: Rendezvous(context(folder, 1, 4), 1.0))
    texts = [str(outcome) for outcome in outcomes if isinstance(outcome, RendezvousError)]
    assert texts
    assert all("WORLD_SIZE must be equal on all ranks; rank" in text for text in texts)


def test_a_rank_that_dies_after_it_came_is_a_failure_at_once(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    place(folder, 0, process_of(child.pid), world_size=4)
    killer = threading.Timer(0.3, lambda: (child.kill(), child.wait()))
    killer.start()
    begin = time.monotonic()
    with pytest.raises(PeerFailure, match=r"came: 1; came and left or died: 0; did not come: 2, 3\."):
        Rendezvous(context(folder, 1, 4), 30.0)
    assert time.monotonic() - begin < 5.0
    killer.join()
    child.communicate()


def test_a_rank_that_died_before_anybody_saw_it_is_a_failure_at_once(folder: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda bits: 5)
    dead = dead_process()
    killer = threading.Timer(0.2, lambda: place(folder, 1, dead, nonce=5))
    killer.start()
    begin = time.monotonic()
    with pytest.raises(PeerFailure, match=r"came: 0; came and left or died: 1\."):
        Rendezvous(context(folder, 0, 2), 30.0)
    assert time.monotonic() - begin < 5.0
    killer.join()


def test_a_rank_that_leaves_in_an_exchange_fails_the_others_at_once(folder: Path) -> None:
    members = meet(folder, 2)
    members[1].leave()
    with pytest.raises(PeerFailure, match=r"topic: rank 0 waited .* came: 0; came and left or died: 1\."):
        members[0].exchange("topic", {}, 30.0)
    members[0].leave()


def test_join_makes_one_rendezvous_a_process(folder: Path) -> None:
    first = rendezvous.join(context(folder, 0, 1), 5.0)
    assert rendezvous.join(context(folder, 0, 1), 5.0) is first
    first.leave()


def test_a_folder_held_by_another_process_is_a_timeout_and_no_hang(folder: Path) -> None:
    with exclusive(folder, 1.0), pytest.raises(CollectiveTimeout, match="stayed locked by another process"):
        Rendezvous(context(folder, 0, 1), 0.2)


def test_records_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "record"
    assert read_record(path) is None
    write_record(path, {"a": 1, "b": "ü"})
    assert read_record(path) == {"a": 1, "b": "ü"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["record"]
    whole = path.read_bytes()
    for wrong in (whole[:-1], whole + b" ", b"", b"2\n[]", b"x\n{}", whole.replace(b"\n", b" ")):
        path.write_bytes(wrong)
        assert read_record(path) is None, wrong
