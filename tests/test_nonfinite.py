"""A non-finite gradient stops or skips one update on all ranks alike and changes no bit of the state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from helpers import assert_trees_bits_equal
from training_helpers import (
    assert_state,
    batch_of,
    collective_calls,
    config,
    linear_model,
    rank_parameters,
    saved_state,
)

import jaxdp
from jaxdp.errors import NonFiniteGradient

WORLD = 4
GOOD, NAN, INFINITE, HUGE = range(4)  # token ids
MODEL = linear_model({"a": [1.0, 1.0, 1.0, 3e38], "b": [2.0, math.nan, math.inf, 2.0], "c": [0.5, 0.5, 0.5, 0.5]})


def batches(*tokens: int) -> list[dict[str, np.ndarray]]:
    return [batch_of([[token, GOOD]]) for token in tokens]


CLEAN = batches(GOOD, GOOD, GOOD, GOOD)


def make_trainer(**fields: Any) -> jaxdp.DataParallelTrainer:
    optimizer = jaxdp.AdamWConfig(learning_rate=1e-2, weight_decay=0.1)
    return jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(WORLD, optimizer=optimizer, **fields))


@pytest.fixture(scope="module", params=[("fused", "tree"), ("staged", "tree"), ("fused", "psum")], ids="-".join)
def raising(request: pytest.FixtureRequest) -> Iterator[tuple[jaxdp.DataParallelTrainer, Mapping[str, np.ndarray]]]:
    with make_trainer(step_mode=request.param[0], reducer=request.param[1]) as trainer:
        yield trainer, saved_state(trainer)


@pytest.fixture(scope="module", params=[("fused", "tree"), ("staged", "tree"), ("staged", "psum")], ids="-".join)
def skipping(request: pytest.FixtureRequest) -> Iterator[tuple[jaxdp.DataParallelTrainer, Mapping[str, np.ndarray]]]:
    with make_trainer(step_mode=request.param[0], reducer=request.param[1], on_nonfinite="skip") as trainer:
        yield trainer, saved_state(trainer)


@pytest.mark.parametrize(("token", "loss"), [(NAN, math.nan), (INFINITE, math.inf)])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_raise_names_the_rank_and_leaf_and_leaves_the_state_as_it_was(raising: Any, rank: int, token: int,
                                                                      loss: float) -> None:
    trainer, initial = raising
    trainer.load_state_tensors(initial, 0)
    trainer.step(CLEAN, 1)
    before = saved_state(trainer)
    tokens = [GOOD] * WORLD
    tokens[rank] = token
    with pytest.raises(NonFiniteGradient, match=rf"step 2\b.*rank {rank}\b.*'b'") as caught:
        trainer.step(batches(*tokens), 2)
    assert_state(trainer, before)
    assert before["updates"] == 1
    metrics = caught.value.metrics
    assert (metrics.step, metrics.update, metrics.parameter_check) == (2, "skipped", "ok")
    np.testing.assert_equal(metrics.loss, loss)
    for others in rank_parameters(trainer)[1:]:
        assert_trees_bits_equal(others, rank_parameters(trainer)[0])


def test_training_goes_on_after_the_error_as_if_the_step_had_not_been(raising: Any) -> None:
    trainer, initial = raising
    trainer.load_state_tensors(initial, 0)
    for step in (1, 2):
        trainer.step(CLEAN, step)
    undisturbed = saved_state(trainer)
    trainer.load_state_tensors(initial, 0)
    trainer.step(CLEAN, 1)
    with pytest.raises(NonFiniteGradient):
        trainer.step(batches(GOOD, NAN, GOOD, GOOD), 2)
    assert trainer.step(CLEAN, 2).update == "applied"
    assert_state(trainer, undisturbed)


def test_a_sum_that_overflows_is_non_finite_although_every_rank_is_finite(raising: Any) -> None:
    trainer, initial = raising
    trainer.load_state_tensors(initial, 0)
    with pytest.raises(NonFiniteGradient, match="finite, their sum is not"):
        trainer.step(batches(HUGE, GOOD, HUGE, GOOD), 1)
    assert_state(trainer, initial)


def test_one_huge_finite_gradient_is_no_fault(raising: Any) -> None:
    trainer, initial = raising
    trainer.load_state_tensors(initial, 0)
    assert trainer.step(batches(HUGE, GOOD, GOOD, GOOD), 1).update == "applied"


def test_skip_leaves_the_state_and_says_so_and_later_steps_are_clean(skipping: Any) -> None:
    trainer, initial = skipping
    trainer.load_state_tensors(initial, 0)
    steps = [CLEAN, batches(GOOD, GOOD, GOOD, NAN), batches(GOOD, INFINITE, GOOD, GOOD), CLEAN]
    reports, states = [], []
    for number, inputs in enumerate(steps, 1):
        reports.append(trainer.step(inputs, number))
        states.append(saved_state(trainer))
    assert [report.update for report in reports] == ["applied", "skipped", "skipped", "applied"]
    assert [int(state["updates"]) for state in states] == [1, 1, 1, 2]
    np.testing.assert_equal([report.loss for report in reports[1:3]], [math.nan, math.inf])
    assert math.isfinite(reports[3].loss)
    assert math.isfinite(reports[3].gradient_norm)
    assert [report.parameter_check for report in reports] == ["ok"] * 4
    trainer.load_state_tensors(states[0], 1)
    assert_state(trainer, states[2])
    trainer.step(CLEAN, 2)
    assert_state(trainer, states[3])


def test_only_the_bad_rank_has_a_non_finite_loss(skipping: Any) -> None:
    trainer, initial = skipping
    trainer.load_state_tensors(initial, 0)
    report = trainer.step(batches(GOOD, GOOD, NAN, GOOD), 1)
    assert [math.isfinite(loss) for loss in report.rank_losses] == [True, True, False, True]


@pytest.mark.parametrize("step_mode", ["fused", "staged"])
def test_the_decision_costs_no_collective_of_its_own(step_mode: str) -> None:
    with make_trainer(step_mode=step_mode, on_nonfinite="skip") as trainer:
        counts = [collective_calls(trainer)]
        for step, inputs in ((1, CLEAN), (2, batches(NAN, GOOD, GOOD, GOOD))):
            trainer.step(inputs, step)
            counts.append(collective_calls(trainer))
    per_step = [np.subtract(after, before).tolist() for before, after in itertools.pairwise(counts)]
    assert per_step[0] == per_step[1] == [len(trainer.plan.buckets) + 1] * WORLD


def test_a_bad_microbatch_of_a_shard_names_the_rank_that_holds_it() -> None:
    inputs = [batch_of([[GOOD], [GOOD]]) for _ in range(4)]
    inputs[3] = batch_of([[GOOD], [NAN]])
    with jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(2, shards=4, accumulation_steps=2)) as trainer:
        before = saved_state(trainer)
        with pytest.raises(NonFiniteGradient, match=r"rank 1\b.*'b'"):
            trainer.step(inputs, 1)
        assert_state(trainer, before)


def test_clipping_does_not_hide_a_non_finite_gradient() -> None:
    with make_trainer(maximum_gradient_norm=1.0) as trainer:
        before = saved_state(trainer)
        with pytest.raises(NonFiniteGradient):
            trainer.step(batches(GOOD, INFINITE, GOOD, GOOD), 1)
        assert_state(trainer, before)
