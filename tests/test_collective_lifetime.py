"""Closing, many rounds, thousands of calls, far sequences: results exact, memory and threads back to base."""

from __future__ import annotations

import gc
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CANARY_BITS, assert_bits_equal, bits, canary, exactly_summable
from jax import lax
from ranks import in_threads, open_collective, per_rank, reference

from jaxdp import CollectiveTimeout, DeterministicCollective

MIB = 1 << 20
SIZES = (8, 4097, 3, 393_217, 64)  # the sizes that calls cycle through


def resident_bytes() -> int:
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_close_right_after_large_calls_leaves_their_result_exact() -> None:
    """Each call fills the capacity, 64 MiB a rank; most have not begun when close is called."""
    devices = jax.devices()[:2]
    with open_collective(2) as collective:
        def body(x: Any) -> Any:
            return lax.fori_loop(0, 8, lambda _, x: collective.all_reduce(x) * 0.5, jnp.full(16 * MIB, x))

        total = jax.pmap(body, axis_name="ranks", devices=devices)(np.array([1, 3], np.float32))
        collective.close()
        assert bool(jnp.all(total == 2))


def on_device(function: Callable[..., Any], rank: int) -> Callable[[Any], Any]:
    """`function` as a program of one rank's device alone, so that a thread of its own can drive it."""
    program = jax.jit(function)
    return lambda x: jax.tree.map(np.asarray, program(jax.device_put(x, jax.devices()[rank])))


def close_during_a_call(collective: DeterministicCollective) -> None:
    while collective.calls(0) == 0:
        time.sleep(0.01)
    collective.close()


def test_close_waits_for_a_call_in_flight_whose_last_rank_is_held() -> None:
    x = exactly_summable(2, 1000, "float32")
    collective = open_collective(2, timeout_s=20.0)

    def rank(index: int) -> Any:
        time.sleep(0.6 * index)
        return on_device(collective.all_reduce, index)(x[index])

    *outcomes, _ = in_threads([lambda: rank(0), lambda: rank(1), lambda: close_during_a_call(collective)])
    for outcome in outcomes:
        assert isinstance(outcome, np.ndarray), outcome
    assert_bits_equal(np.stack(outcomes), reference("all_reduce", x))


def test_close_with_a_rank_that_never_comes_leaves_the_wait_its_own_error() -> None:
    collective = open_collective(2, timeout_s=0.5)
    waited, closed = in_threads([lambda: on_device(collective.all_reduce, 0)(np.zeros(3, np.float32)),
                                 lambda: close_during_a_call(collective)])
    assert closed is None
    assert "CollectiveTimeout: call 1" in str(waited)


def test_fifty_rounds_of_create_use_and_close_leave_memory_and_threads_as_they_were() -> None:
    x = exactly_summable(4, 1 << 18, "float32")
    expected = reference("all_reduce", x)

    def round_trip() -> None:
        with open_collective(4) as collective:
            assert_bits_equal(per_rank(collective.all_reduce, 4)(x), expected)
        jax.clear_caches()

    for _ in range(5):
        round_trip()
    memory, threads = resident_bytes(), thread_count()
    for _ in range(45):
        round_trip()
    assert thread_count() <= threads
    assert resident_bytes() - memory < 45 * MIB  # one input of one rank a round would be 45 MiB, staging far more


@pytest.mark.parametrize(("world_size", "rounds", "pattern"), [(4, 400, 0x4381), (8, 40, 0x4383)])
def test_thousands_of_calls_of_changing_sizes_by_ranks_that_dawdle(
        world_size: int, rounds: int, pattern: int) -> None:
    """Each round is five calls in one program; each rank has a thread, and one of them sleeps up to 2 ms."""
    inputs = canary(world_size, max(SIZES), "bfloat16")
    assert CANARY_BITS[world_size, "bfloat16"] == pattern
    delays = np.random.default_rng(0).uniform(0, 0.002, rounds)
    with open_collective(world_size) as collective:
        memory = []

        def rank(index: int) -> int:
            local = jax.device_put(inputs[index], jax.devices()[index])
            program = on_device(lambda x: [collective.all_reduce(x[:size]) for size in SIZES], index)
            wrong = 0
            for turn in range(rounds):
                time.sleep(delays[turn] * (turn % world_size == index))
                wrong += sum(int((bits(total) != pattern).sum()) for total in program(local))
                if index == 0 and turn in (rounds // 4, rounds - 1):
                    memory.append(resident_bytes())
            return wrong

        assert in_threads([lambda i=i: rank(i) for i in range(world_size)]) == [0] * world_size
        assert [collective.calls(rank) for rank in range(world_size)] == [rounds * len(SIZES)] * world_size
    assert memory[1] - memory[0] < 32 * MIB


@pytest.mark.parametrize("first", [2**31 - 5, 2**32 - 5, 2**63 - 5], ids=["2^31", "2^32", "2^63"])
def test_sequences_pass_the_limits_of_narrower_integers(first: int) -> None:
    x = exactly_summable(4, 33, "float32")
    with open_collective(4, first_sequence=first) as collective:
        program = per_rank(lambda x: lax.scan(
            lambda value, _: (value, (collective.all_reduce(value), collective.reduce_scatter(value[:32]))),
            x, length=10)[1], 4)
        before = [collective.calls(rank) for rank in range(4)]
        totals, blocks = program(x)
        after = [collective.calls(rank) for rank in range(4)]
    assert_bits_equal(totals, np.stack([reference("all_reduce", x)] * 10, axis=1))
    assert_bits_equal(blocks, np.stack([reference("reduce_scatter", x[:, :32])] * 10, axis=1))
    assert [b - a for a, b in zip(before, after, strict=True)] == [20] * 4


def test_a_timeout_far_along_names_the_call_s_own_number() -> None:
    with pytest.raises(CollectiveTimeout, match=rf"call {2**63 + 7}\b"):  # noqa: SIM117
        with open_collective(2, first_sequence=2**63 + 7, timeout_s=0.3) as collective:
            per_rank(collective.all_reduce, 1)(np.zeros((1, 3), np.float32))
