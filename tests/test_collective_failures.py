"""Ranks that disagree, do not come, or come after the end: a named error inside the deadline, for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, exactly_summable, run_python
from jax import lax
from ranks import in_threads, open_collective, per_rank, reference

from jaxdp import CollectiveTimeout, DeterministicCollective, RankMismatch, create_deterministic_collective
from jaxdp.errors import CollectiveError

WORLD = 4
DEADLINE_S = 0.5
Body = Callable[[DeterministicCollective, Any], Any]


@pytest.fixture
def collective() -> Iterator[DeterministicCollective]:
    collective = open_collective(WORLD, timeout_s=DEADLINE_S)
    yield collective
    collective.close()


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def assert_poisoned(collective: DeterministicCollective, kind: type[CollectiveError], sentence: str) -> None:
    """Each later call raises the first failure, so it waited for nothing: a wait would name a later call."""
    with pytest.raises(kind) as named:
        collective.raise_if_failed()
    assert str(named.value) in sentence
    for operation in (collective.all_reduce, collective.reduce_scatter):
        with pytest.raises(kind) as again:
            per_rank(operation, WORLD)(zeros(WORLD, 8))
        assert str(again.value) == str(named.value)


@pytest.mark.parametrize(("operation", "signature"), [
    ("all_reduce", r"all_reduce float32\[4\]"), ("all_gather", r"all_gather float32\[4\]"),
    ("reduce_scatter", r"reduce_scatter float32\[4\]"),
])
def test_two_of_four_ranks_time_out_naming_call_operation_waiting_and_missing(
        operation: str, signature: str, collective: DeterministicCollective) -> None:
    present = [jax.devices()[i] for i in (0, 2)]
    started = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError) as failure:
        per_rank(getattr(collective, operation), 2, devices=present)(zeros(2, 4))
    assert DEADLINE_S <= time.monotonic() - started < DEADLINE_S + 10
    assert "CollectiveTimeout" in str(failure.value)
    with pytest.raises(CollectiveTimeout, match=rf"call 1, {signature}: rank 0, 2 waited 0\.5\d* s for rank 1, 3\b"):
        collective.raise_if_failed()
    assert_poisoned(collective, CollectiveTimeout, str(failure.value))


def test_a_barrier_that_a_rank_never_reaches_times_out(collective: DeterministicCollective) -> None:
    def body(x: Any) -> Any:
        collective.barrier()
        return x

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"CollectiveTimeout: call 1, barrier.*for rank 1, 2, 3"):
        per_rank(body, 1)(zeros(1, 4))


def test_leaving_the_context_raises_the_failure_by_its_name() -> None:
    with pytest.raises(CollectiveTimeout, match=r"rank 0, 1 waited .* for rank 2, 3"):  # noqa: SIM117
        with open_collective(WORLD, timeout_s=DEADLINE_S) as collective:
            per_rank(collective.all_reduce, 2)(zeros(2, 3))


def test_a_program_compiled_before_the_failure_raises_it_without_a_wait_of_its_own(
        collective: DeterministicCollective) -> None:
    program = per_rank(collective.all_reduce, WORLD)
    program(zeros(WORLD, 3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveTimeout: call 2"):
        per_rank(collective.all_reduce, 2)(zeros(2, 3))
    for _ in range(2):  # a wait of its own would name call 3, or all ranks
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"CollectiveTimeout: call 2, .*: rank 0, 1 waited"):
            program(zeros(WORLD, 3))


def test_another_communicator_of_the_same_devices_still_works(collective: DeterministicCollective) -> None:
    x = exactly_summable(WORLD, 5, "float32")
    with open_collective(WORLD) as other:
        with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveTimeout"):
            per_rank(collective.all_reduce, 2)(zeros(2, 3))
        other.raise_if_failed()
        assert_bits_equal(per_rank(other.all_reduce, WORLD)(x), reference("all_reduce", x))


def test_a_rank_that_is_late_but_inside_the_deadline_fails_nobody() -> None:
    x = exactly_summable(WORLD, 5, "float32")
    with open_collective(WORLD, timeout_s=30.0) as collective:
        def rank(index: int) -> np.ndarray:
            time.sleep(0.3 * (index == 2))
            return np.asarray(jax.jit(collective.all_reduce)(jax.device_put(x[index], jax.devices()[index])))

        outcomes = in_threads([lambda i=i: rank(i) for i in range(WORLD)])
    assert_bits_equal(np.stack(outcomes), reference("all_reduce", x))


DISAGREEMENTS: dict[str, tuple[Body, Body, str, str]] = {
    "shape": (lambda c, x: c.all_reduce(x[:3]), lambda c, x: c.all_reduce(x[:4]),
              "all_reduce float32[3]", "all_reduce float32[4]"),
    "shape of equal count": (lambda c, x: c.all_reduce(x.reshape(4, 2)), lambda c, x: c.all_reduce(x),
                             "all_reduce float32[4,2]", "all_reduce float32[8]"),
    "dtype": (lambda c, x: c.all_reduce(x.astype(jnp.float16)), lambda c, x: c.all_reduce(x.astype(jnp.bfloat16)),
              "all_reduce float16[8]", "all_reduce bfloat16[8]"),
    "operation": (lambda c, x: c.all_gather(x), lambda c, x: c.reduce_scatter(x),
                  "all_gather float32[8]", "reduce_scatter float32[8]"),
    "barrier": (lambda c, x: c.barrier(), lambda c, x: c.all_reduce(x), "barrier", "all_reduce float32[8]"),
    "lanes": (lambda c, x: c.all_reduce_many([x[:4], x[4:]]), lambda c, x: c.all_reduce(x),
              "all_reduce float32[4] float32[4]", "all_reduce float32[8]"),
    "order of lanes": (lambda c, x: c.reduce_scatter_many([x, x[:4]]), lambda c, x: c.reduce_scatter_many([x[:4], x]),
                       "reduce_scatter float32[8] float32[4]", "reduce_scatter float32[4] float32[8]"),
    "order of calls": (lambda c, x: (c.all_reduce(x[:4]), c.all_reduce(x)),
                       lambda c, x: (c.all_reduce(x), c.all_reduce(x[:4])),
                       "all_reduce float32[4]", "all_reduce float32[8]"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_all_fail_naming_both_signatures(what: str) -> None:
    """Ranks 0 and 1 run one program, ranks 2 and 3 another; the deadline is too long to be what ends it."""
    first, second, one, other = DISAGREEMENTS[what]
    with open_collective(WORLD, timeout_s=30.0) as collective:
        def rank(index: int) -> Any:
            def program(x: Any) -> Any:
                (first, second)[index // 2](collective, x)
                return x

            return jax.block_until_ready(jax.jit(program)(jax.device_put(zeros(8), jax.devices()[index])))

        outcomes = in_threads([lambda i=i: rank(i) for i in range(WORLD)])
        with pytest.raises(RankMismatch) as named:
            collective.raise_if_failed()
    for outcome in outcomes:  # a rank that has not traced its call yet is refused there, by name
        assert isinstance(outcome, jax.errors.JaxRuntimeError | RankMismatch)
        assert str(named.value) in str(outcome)
    says = str(named.value)
    sides = [side.split(" has ") for side in says.split("call 1: ")[1].split(". ")[0].split(", rank ")]
    assert {(rank.removeprefix("rank ") in "01", signature) for rank, signature in sides} == {
        (True, one), (False, other)}


def test_a_branch_that_differs_between_ranks_of_one_program_is_a_mismatch(collective: DeterministicCollective) -> None:
    def body(x: Any) -> Any:
        return lax.cond(lax.axis_index("ranks") == 3, lambda: collective.all_reduce(x[:2])[0],
                        lambda: collective.all_reduce(x)[0])

    with pytest.raises(jax.errors.JaxRuntimeError, match="RankMismatch: call 1") as failure:
        per_rank(body, WORLD)(zeros(WORLD, 3))
    assert "rank 3 has all_reduce float32[2]" in str(failure.value)
    assert "has all_reduce float32[3]" in str(failure.value)
    assert_poisoned(collective, RankMismatch, str(failure.value))


def test_a_call_more_on_some_ranks_times_out_naming_its_index(collective: DeterministicCollective) -> None:
    def body(x: Any) -> Any:
        total = collective.all_reduce(x)
        return lax.cond(lax.axis_index("ranks") < 1, collective.all_reduce, lambda x: x, total)

    with pytest.raises(jax.errors.JaxRuntimeError,
                       match=r"CollectiveTimeout: call 2, all_reduce float32\[3\]: rank 0 .* rank 1, 2, 3"):
        per_rank(body, WORLD)(zeros(WORLD, 3))


def test_a_program_on_a_device_outside_the_communicator_is_refused_by_name() -> None:
    with pytest.raises(CollectiveError, match=r"\b4\b"):  # noqa: SIM117
        with create_deterministic_collective(jax.devices()[:4], transport="local", timeout_s=DEADLINE_S) as collective:
            per_rank(collective.all_reduce, 4, devices=jax.devices()[4:])(zeros(4, 3))


FAILED_PROGRAM = """
import sys, time
import jax, numpy as np, jaxdp
from jax import lax
how = sys.argv[1]
devices = jax.devices()[:4]
try:
    with jaxdp.create_deterministic_collective(devices, transport="local", timeout_s=0.3) as collective:
        program = jax.pmap(collective.all_reduce, axis_name="ranks", devices=devices)
        if how == "timeout":
            jax.pmap(collective.all_reduce, axis_name="ranks", devices=devices[:2])(np.ones((2, 3), np.float32))
        elif how == "mismatch":
            body = lambda x: lax.cond(lax.axis_index("ranks") < 2, lambda: collective.all_reduce(x[:1])[0],
                                      lambda: collective.all_reduce(x)[0])
            jax.pmap(body, axis_name="ranks", devices=devices)(np.ones((4, 3), np.float32))
        elif how == "closed":
            program(np.ones((4, 3), np.float32))
            collective.close()
        elif how == "poisoned":
            try:
                jax.pmap(collective.all_reduce, axis_name="ranks", devices=devices[:2])(np.ones((2, 3), np.float32))
            except Exception:
                pass
        jax.block_until_ready(program(np.ones((4, 3), np.float32)))
except (jaxdp.CollectiveTimeout, jaxdp.RankMismatch, jaxdp.errors.CommunicatorClosed) as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(("how", "name"), [
    ("timeout", "CollectiveTimeout"), ("mismatch", "RankMismatch"), ("poisoned", "CollectiveTimeout"),
    ("closed", "CommunicatorClosed"),
])
def test_a_failure_that_was_handled_leaves_nothing_to_say_at_exit(how: str, name: str) -> None:
    done = run_python(FAILED_PROGRAM, how, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert (done.stdout.strip(), done.stderr) == (name, "")
