"""Ranks with different numbers of target tokens: refused before any collective, or weighed by tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from training_helpers import (
    assert_state,
    batch_of,
    collective_calls,
    config,
    linear_model,
    perceptron,
    ragged_batch,
    rank_parameters,
    saved_state,
)

import jaxdp
from jaxdp.errors import DataError, UnevenInputs

MODEL = linear_model({"p": [1.0, 5.0]})  # token 0 has gradient 1, token 1 has gradient 5
THREE_AND_ONE = [batch_of([[0, 0, 0]]), batch_of([[1, -1, -1]])]
EVEN = [batch_of([[0, 0]]), batch_of([[1, 1]])]


def make_trainer(world: int, **fields: Any) -> jaxdp.DataParallelTrainer:
    return jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(world, optimizer=optax.sgd(1.0), **fields))


@pytest.fixture(scope="module")
def rejecting() -> Iterator[jaxdp.DataParallelTrainer]:
    with make_trainer(2) as trainer:
        trainer.step(EVEN, 1)
        yield trainer


@pytest.fixture(scope="module", params=["fused", "staged"])
def weighted(request: pytest.FixtureRequest) -> Iterator[jaxdp.DataParallelTrainer]:
    with make_trainer(2, uneven_inputs="token-weighted", step_mode=request.param) as trainer:
        yield trainer


def mean_gradient(trainer: jaxdp.DataParallelTrainer, batches: list[Any]) -> float:
    """How far one update by SGD of rate 1 moved the parameter, the same on every rank."""
    before = [float(rank["p"]) for rank in rank_parameters(trainer)]
    trainer.step(batches, 1)
    after = [float(rank["p"]) for rank in rank_parameters(trainer)]
    moved = [old - new for old, new in zip(before, after, strict=True)]
    assert len(set(moved)) == 1
    return moved[0]


@pytest.fixture
def untouched(rejecting: jaxdp.DataParallelTrainer) -> Iterator[jaxdp.DataParallelTrainer]:
    """Fails the test if the state changed or a collective was issued."""
    state, calls = saved_state(rejecting), collective_calls(rejecting)
    assert calls[0] > 0
    yield rejecting
    assert_state(rejecting, state)
    assert collective_calls(rejecting) == calls


def test_unequal_counts_are_refused_by_name_before_any_collective(untouched: jaxdp.DataParallelTrainer) -> None:
    with pytest.raises(UnevenInputs, match=r"3, 1\b.*token-weighted"):
        untouched.step(THREE_AND_ONE, 2)


def test_equal_counts_in_different_places_are_not_refused(rejecting: jaxdp.DataParallelTrainer) -> None:
    metrics = rejecting.step([batch_of([[0, -1], [-1, 0]]), batch_of([[1], [1]])], 2)
    assert metrics.rank_tokens == (2, 2)


@pytest.mark.parametrize("batches", [[batch_of([[-1, -1]])] * 2, [batch_of([[-1]]), batch_of([])]],
                         ids=["ignored", "empty"])
def test_a_step_without_any_target_is_refused(untouched: jaxdp.DataParallelTrainer, batches: list[Any]) -> None:
    shaped = [{name: x.reshape(len(x), -1) if x.size else np.zeros((0, 1), np.int32) for name, x in batch.items()}
              for batch in batches]
    with pytest.raises(DataError, match="target"):
        untouched.step(shaped, 2)


def test_a_step_without_any_target_is_refused_in_weighted_mode_too(weighted: jaxdp.DataParallelTrainer) -> None:
    state = saved_state(weighted)
    with pytest.raises(DataError, match="target"):
        weighted.step([batch_of([[-1, -1]])] * 2, 1)
    assert_state(weighted, state)


@pytest.mark.parametrize("missing", [[batch_of([[0]])], [batch_of([[0]]), None]], ids=["absent", "None"])
def test_a_rank_that_has_run_out_of_batches_is_named_with_the_step(untouched: jaxdp.DataParallelTrainer,
                                                                   missing: list[Any]) -> None:
    with pytest.raises(DataError, match=r"step 5\b.*rank 1\b"):
        untouched.step(missing, 5)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_uneven_shards_are_refused_alike_at_every_world_size(world: int) -> None:
    """Ranks of two shards hold 4 tokens each here; a run may not fail when it goes on at another world size."""
    batches = [batch_of([[0, 0, 0]]), batch_of([[0, -1, -1]]), batch_of([[0, -1, -1]]), batch_of([[0, 0, 0]])]
    with make_trainer(world, shards=4) as trainer:
        with pytest.raises(UnevenInputs, match=r"3, 1, 1, 3\b"):
            trainer.step(batches, 1)
        assert collective_calls(trainer) == [0] * world


def test_three_tokens_and_one_weigh_three_to_one(weighted: jaxdp.DataParallelTrainer) -> None:
    assert mean_gradient(weighted, THREE_AND_ONE) == 2.0  # the mean of the ranks' means is 3


def test_ranks_may_differ_in_shape(weighted: jaxdp.DataParallelTrainer) -> None:
    assert mean_gradient(weighted, [batch_of([[0, 0, 0]]), batch_of([[1]])]) == 2.0
    assert mean_gradient(weighted, [batch_of([[0, 0]]), batch_of([[1], [1], [0], [0]])]) == pytest.approx(14 / 6)


def test_metrics_count_what_each_rank_held(weighted: jaxdp.DataParallelTrainer) -> None:
    weighted.load_state_tensors({name: np.ones_like(x) for name, x in weighted.state_tensors().items()}, 0)
    metrics = weighted.step(THREE_AND_ONE, 1)
    assert (metrics.tokens, metrics.rank_tokens) == (4, (3, 1))
    assert (metrics.loss, metrics.rank_losses, metrics.gradient_norm) == (2.0, (1.0, 5.0), 2.0)


@pytest.mark.parametrize("nothing", [batch_of([[-1, -1]]), {name: np.zeros((0, 2), np.int32)
                                                           for name in ("inputs", "targets")}],
                         ids=["ignored", "no row"])
def test_a_rank_without_a_token_takes_part_with_weight_0(weighted: jaxdp.DataParallelTrainer, nothing: Any) -> None:
    weighted.load_state_tensors({name: np.ones_like(x) for name, x in weighted.state_tensors().items()}, 0)
    metrics = weighted.step([batch_of([[1, 0]]), nothing], 1)
    assert (metrics.tokens, metrics.rank_tokens) == (2, (2, 0))
    assert (metrics.loss, metrics.rank_losses, metrics.gradient_norm) == (3.0, (3.0, None), 3.0)


def test_the_others_average_is_not_diluted_by_a_rank_that_is_out() -> None:
    with make_trainer(4, uneven_inputs="token-weighted") as trainer:
        one = batch_of([[0, 0]])
        assert mean_gradient(trainer, [one, one, one, batch_of([[-1, -1]])]) == 1.0  # not 0.75


@pytest.mark.parametrize("step_mode", ["fused", "staged"])
def test_uneven_ranks_learn_what_one_device_learns_from_all_their_tokens(step_mode: str) -> None:
    model = perceptron()
    batches: list[Any] = [ragged_batch(0, 1), {name: x[:1, :3] for name, x in ragged_batch(1, 2).items()}]
    settings = config(2, uneven_inputs="token-weighted", step_mode=step_mode, optimizer=optax.sgd(1.0))
    with jaxdp.DataParallelTrainer(model, seed=0, config=settings) as trainer:
        before = trainer.parameters()
        metrics = trainer.step(batches, 1)
        after = trainer.parameters()

    gradient = jax.jit(jax.value_and_grad(lambda p, batch: model.loss(p, batch, None), has_aux=True))
    results = [jax.device_get(gradient(before, batch)) for batch in batches]
    weight = sum(float(w) for (_, w), _ in results)
    expected = jax.tree.map(lambda p, *grads: p - sum(grads) / weight, before, *(grads for _, grads in results))
    assert len(set(metrics.rank_tokens)) == 2
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=0, atol=1e-6), after, expected)
