"""Microbatches add up to one update: nothing is lost at the first step and nothing left over at the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import pytest
from helpers import ROOT, run_python
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
from jaxdp.errors import DataError

MODEL = linear_model({"p": [0.0, 1.0, 2.0, 5.0]}, initial=10.0)  # token t has this gradient
MODES = [{"step_mode": "fused"}, {"step_mode": "staged"}, {"step_mode": "fused", "persistent_gradient_buckets": True},
         {"step_mode": "fused", "persistent_gradient_buckets": True, "gradient_bucket_views": True}]


@pytest.fixture(scope="module", params=MODES, ids=["fused", "staged", "persistent", "views"])
def trainer(request: pytest.FixtureRequest) -> Iterator[jaxdp.DataParallelTrainer]:
    settings = config(2, accumulation_steps=2, optimizer=optax.sgd(1.0), **request.param)
    with jaxdp.DataParallelTrainer(MODEL, seed=0, config=settings) as trainer:
        yield trainer


def moved(trainer: jaxdp.DataParallelTrainer, batches: list[Any], step: int) -> tuple[float, jaxdp.StepMetrics]:
    """How far the update moved the parameter, the same on both ranks."""
    before = float(rank_parameters(trainer)[0]["p"])
    metrics = trainer.step(batches, step)
    first, second = (float(rank["p"]) for rank in rank_parameters(trainer))
    assert first == second
    return before - first, metrics


def test_every_update_from_the_first_on_has_both_microbatches(trainer: jaxdp.DataParallelTrainer) -> None:
    one_then_two = [batch_of([[1], [2]])] * 2
    for step in (1, 2, 3):
        assert moved(trainer, one_then_two, step)[0] == 1.5
    still, metrics = moved(trainer, [batch_of([[0], [0]])] * 2, 4)
    assert (still, metrics.gradient_norm, metrics.update) == (0.0, 0.0, "applied")
    assert moved(trainer, one_then_two, 5)[0] == 1.5


def test_microbatches_are_weighed_by_their_tokens_and_divided_once(trainer: jaxdp.DataParallelTrainer) -> None:
    three_and_one = [batch_of([[1, 1, 1], [3, -1, -1]])] * 2
    update, metrics = moved(trainer, three_and_one, 1)
    assert update == 2.0  # (3*1 + 1*5) / 4; the mean of the microbatches' means is 3
    assert (metrics.tokens, metrics.rank_tokens) == (8, (4, 4))


def test_a_microbatch_without_a_target_adds_nothing(trainer: jaxdp.DataParallelTrainer) -> None:
    assert moved(trainer, [batch_of([[-1, -1], [3, 1]])] * 2, 1)[0] == 3.0


def test_accumulation_costs_no_further_collective(trainer: jaxdp.DataParallelTrainer) -> None:
    before = collective_calls(trainer)
    trainer.step([batch_of([[1], [2]])] * 2, 1)
    assert np.subtract(collective_calls(trainer), before).tolist() == [len(trainer.plan.buckets) + 1] * 2


def test_sequences_that_do_not_split_are_refused_with_both_numbers(trainer: jaxdp.DataParallelTrainer) -> None:
    state = saved_state(trainer)
    with pytest.raises(DataError, match=r"accumulation_steps=2.* 3\b"):
        trainer.step([batch_of([[1], [2], [1]])] * 2, 1)
    assert_state(trainer, state)


@pytest.mark.parametrize("step_mode", ["fused", "staged"])
def test_any_number_of_microbatches_gives_the_update_of_the_whole_batch(step_mode: str) -> None:
    digests = set()
    rows = [[[1, 2], [3, 3], [0, 1], [2, -1]], [[2, 2], [1, 0], [3, -1], [1, 1]]]
    for count in (1, 2, 4):
        settings = config(2, accumulation_steps=count, step_mode=step_mode)
        with jaxdp.DataParallelTrainer(MODEL, seed=0, config=settings) as trainer:
            metrics = trainer.step([batch_of(part) for part in rows], 1)
            digests.add((metrics.gradient_digest, metrics.loss, metrics.tokens))
    assert len(digests) == 1


def test_staged_microbatches_are_added_where_no_communicator_has_loaded_the_native_code() -> None:
    code = """
import sys; sys.path.insert(0, sys.argv[1])
from training_helpers import batch_of, config, jaxdp, linear_model
settings = config(1, reducer="psum", step_mode="staged", accumulation_steps=2)
with jaxdp.DataParallelTrainer(linear_model({"p": [1.0, 2.0]}), seed=0, config=settings) as trainer:
    print(trainer.step([batch_of([[0], [1]])], 1).gradient_norm)
"""
    assert run_python(code, ROOT / "tests").stdout.split() == ["1.5"]
