"""Thousands of calls of changing shapes between ranks that come early and late: no hang, no torn read."""

from __future__ import annotations

import random
import resource
import time

import pytest
from helpers import CANARY_BITS, bits, canary

from multiprocess.member import ONE_SHOT, TWO_SHOT, Member
from multiprocess.ranks import Ranks

COUNTS = (8, 4097, 3, 393_217, 64)  # the shapes of a public report of torn flags, all a multiple of nothing


def check_changing_shapes(calls: int, one_shot_bytes: int) -> None:
    member = Member(one_shot_bytes=one_shot_bytes, staging_bytes=1 << 18)
    x = canary(member.world, max(COUNTS), "bfloat16")[member.rank]
    pattern = CANARY_BITS[member.world, "bfloat16"]
    pause = random.Random(1)
    resident = 0
    for call in range(calls):
        if pause.random() < 0.2 and call % member.world == member.rank:
            time.sleep(pause.random() * 0.002)
        result = member.all_reduce(x[:COUNTS[call % len(COUNTS)]])[0]
        assert (bits(result) == pattern).all(), f"call {call}: {set(bits(result).tolist())}, expected {pattern}"
        if call == calls // 10:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    assert grown < 4 << 10, f"the peak of memory grew by {grown} KiB over the loop"
    member.close()


@pytest.mark.parametrize(("world", "calls", "one_shot_bytes"),
                         [(4, 2000, ONE_SHOT), (4, 1000, TWO_SHOT), (8, 200, 4096)])
def test_changing_shapes_with_random_delays_give_one_constant(ranks: Ranks, world: int, calls: int,
                                                              one_shot_bytes: int) -> None:
    ranks.run("test_ipc_stress:check_changing_shapes", world, calls=calls, one_shot_bytes=one_shot_bytes)


def check_mixed_calls(calls: int) -> None:
    """All ranks draw the same operations and sizes; each sleeps by its own dice."""
    member = Member(one_shot_bytes=2048, staging_bytes=4096)
    shared, own = random.Random(7), random.Random(member.rank)
    x = canary(member.world, 8 * 600, "float32")[member.rank]
    pattern = CANARY_BITS[member.world, "float32"]
    for call in range(calls):
        if own.random() < 0.02:
            time.sleep(own.random() * 0.002)
        operation = shared.choice(("all_reduce", "reduce_scatter", "all_gather", "barrier"))
        count = shared.randrange(600)
        if operation == "all_reduce":
            assert (bits(member.all_reduce(x[:count])[0]) == pattern).all(), call
        elif operation == "reduce_scatter":
            assert (bits(member.reduce_scatter(x[:member.world * count])[0]) == pattern).all(), call
        elif operation == "all_gather":
            gathered = member.all_gather(x[:count])[0].reshape(member.world, count)
            assert (gathered == canary(member.world, count, "float32")).all(), call
        else:
            member.barrier()
    assert member.calls() == calls
    member.close()


@pytest.mark.parametrize(("world", "calls"), [(2, 2000), (4, 10_000), (8, 500)])
def test_mixed_calls_with_random_delays(ranks: Ranks, world: int, calls: int) -> None:
    ranks.run("test_ipc_stress:check_mixed_calls", world, calls=calls, timeout_s=100)
