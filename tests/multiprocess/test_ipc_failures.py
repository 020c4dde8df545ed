"""A rank that is late, missing, dead, closed or of another mind ends the call on all ranks, by name and in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from jaxdp.collectives.operations import Operation
from jaxdp.errors import CollectiveError, CollectiveTimeout, CommunicatorClosed, PeerFailure, RankMismatch
from jaxdp.ranked import rendezvous
from jaxdp.ranked.context import from_environment
from multiprocess.member import TWO_SHOT, Member
from multiprocess.ranks import Ranks

ONES = np.ones(10, np.float32)
LONG_S = 30.0  # a deadline that a test which passes never reaches


def expect_failure(kind: type[CollectiveError] | tuple[type[CollectiveError], ...], pattern: str,
                   call: Callable[[], object], within_s: float) -> None:
    """`call` raises `kind` with text matching `pattern` in less than `within_s`."""
    begin = time.monotonic()
    with pytest.raises(kind, match=pattern):
        call()
    assert time.monotonic() - begin < within_s


def expect_poisoned(member: Member, kind: type[CollectiveError]) -> None:
    """Every later call raises the same at once, and closing has nothing to wait for."""
    expect_failure(kind, ".", lambda: member.all_reduce(ONES), within_s=10.0)
    begin = time.monotonic()
    member.close()
    assert time.monotonic() - begin < 0.5


def check_late_rank() -> None:
    member = Member(timeout_s=LONG_S)
    member.barrier()
    if member.rank == 1:
        time.sleep(0.7)
    assert member.all_reduce(ONES)[0][0] == member.world
    member.close()


def test_a_late_rank_is_waited_for(ranks: Ranks) -> None:
    ranks.run("test_ipc_failures:check_late_rank", 2)


def check_missing_ranks() -> None:
    member = Member(timeout_s=0.5)
    member.barrier()
    if member.rank >= 2:
        time.sleep(1.5)
    text = r"call 2, all_reduce float32\[10\]: rank [01] waited 0\.5 s for ranks 2, 3\."
    # Ranks 2 and 3 come after the deadline and learn of it.
    expect_failure(CollectiveTimeout, text, lambda: member.all_reduce(ONES), within_s=10.0)
    expect_poisoned(member, CollectiveTimeout)


def test_missing_ranks_are_named_at_the_deadline_on_all_ranks(ranks: Ranks) -> None:
    ranks.run("test_ipc_failures:check_missing_ranks", 4)


MISMATCHES = {
    "operation": (lambda m: m.all_reduce(ONES) if m.rank else m.barrier(),
                  r"rank 0 has call 2, barrier, but rank 1 has call 2, all_reduce float32\[10\]"),
    "shape": (lambda m: m.all_reduce(ONES[:9] if m.rank == 3 else ONES),
              r"rank 0 has call 2, all_reduce float32\[10\], but rank 3 has call 2, all_reduce float32\[9\]"),
    "dtype": (lambda m: m.all_reduce(ONES.astype(np.float16) if m.rank == 2 else ONES),
              r"rank 0 has call 2, all_reduce float32\[10\], but rank 2 has call 2, all_reduce float16\[10\]"),
    "sequence": (lambda m: (m.barrier() if m.rank == 1 else None, m.all_reduce(ONES)),
                 r"rank 0 has call 2, all_reduce float32\[10\], but rank 1 has call 2, barrier"),
    "number of pieces": (lambda m: m.all_reduce(np.ones(10 if m.rank == 0 else 10_000, np.float32)),
                         r"rank 0 has call 2, all_reduce float32\[10\], but rank 1 has .* float32\[10000\]"),
    "the end of a long signature": (
        lambda m: m.call(Operation.ALL_REDUCE, [ONES], [(10,)], "x" * 5000 + str(m.rank == 3)),
        r"rank 0 has call 2, x{1000}\.\.\. \(5005 bytes, hash \d+\), but rank 3 has .*\(5004 bytes, hash \d+\)"),
}


def check_mismatch(what: str) -> None:
    member = Member(timeout_s=LONG_S)
    member.barrier()
    call, text = MISMATCHES[what]
    expect_failure(RankMismatch, text, lambda: call(member), within_s=10.0)
    expect_poisoned(member, RankMismatch)


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_disagree_all_refuse_naming_both_signatures(ranks: Ranks, what: str) -> None:
    ranks.run("test_ipc_failures:check_mismatch", 4, what=what)


def check_death(before_call: int) -> None:
    member = Member(timeout_s=LONG_S, one_shot_bytes=TWO_SHOT)
    for call in range(1, 10):
        if member.rank == 1 and call == before_call:
            os.kill(os.getpid(), signal.SIGKILL)
        if call < before_call:
            member.all_reduce(ONES)
        else:
            text = rf"call {before_call}, all_reduce .*: rank [023] waited for rank 1, whose process has died"
            expect_failure(PeerFailure, text, lambda: member.all_reduce(ONES), within_s=10.0)
            break
    expect_poisoned(member, PeerFailure)


def test_a_killed_rank_fails_the_others_well_before_the_deadline(ranks: Ranks) -> None:
    ranks.run("test_ipc_failures:check_death", 4, before_call=3, expect=[0, -signal.SIGKILL, 0, 0])


def check_stopped_rank() -> None:
    member = Member(timeout_s=0.5)
    member.barrier()
    if member.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    expect_failure(CollectiveTimeout, "for rank 1", lambda: member.all_reduce(ONES), within_s=10.0)
    os.kill(rendezvous.join(member.context, LONG_S).processes[1].pid, signal.SIGKILL)


def test_a_stopped_rank_is_a_timeout_and_no_hang(ranks: Ranks) -> None:
    ranks.run("test_ipc_failures:check_stopped_rank", 2, expect=[0, -signal.SIGKILL])


def check_closed_peer() -> None:
    member = Member(timeout_s=LONG_S)
    member.barrier()
    text = r"call 2, all_reduce float32\[10\]: rank 0 waited for rank 1, which closed the communicator"
    if member.rank == 0:
        expect_failure(CommunicatorClosed, text, lambda: member.all_reduce(ONES), within_s=10.0)
        expect_poisoned(member, CommunicatorClosed)
    else:
        expect_failure(CommunicatorClosed, text, member.close, within_s=10.0)


def test_a_call_that_a_closed_peer_will_never_make_fails_on_both(ranks: Ranks) -> None:
    ranks.run("test_ipc_failures:check_closed_peer", 2)


def check_different_settings() -> None:
    rank = int(os.environ["RANK"])
    expect_failure(RankMismatch, "rank 0 has .*'first_sequence': 1.*, rank 1 has .*'first_sequence': 2",
                   lambda: Member(first_sequence=1 + rank), within_s=10.0)


def test_ranks_with_different_settings_refuse_to_join(ranks: Ranks) -> None:
    ranks.run("test_ipc_failures:check_different_settings", 2)


def check_lonely_start() -> None:
    # The rank whose deadline comes second may see that the first has ended by then.
    expect_failure((CollectiveTimeout, PeerFailure), r"start: rank [02] waited .*; came: .*; did not come: 1, 3\.",
                   lambda: Member(timeout_s=1.0), within_s=10.0)


def test_an_absent_rank_is_named_at_the_start(ranks: Ranks) -> None:
    ranks.run("test_ipc_failures:check_lonely_start", 4, ranks=[0, 2])


def check_death_at_the_start() -> None:
    if os.environ["RANK"] == "1":
        context = from_environment()
        assert context is not None
        rendezvous.join(context, LONG_S)
        os.kill(os.getpid(), signal.SIGKILL)
    expect_failure(PeerFailure, r"communicator-1: rank 0 waited .*; came: 0; came and left or died: 1\.",
                   lambda: Member(timeout_s=LONG_S), within_s=10.0)


def test_a_rank_that_dies_while_the_communicator_is_made_fails_the_others_at_once(ranks: Ranks) -> None:
    ranks.run("test_ipc_failures:check_death_at_the_start", 2, expect=[0, -signal.SIGKILL])
