"""The trainer refuses what it cannot use and changes nothing, repeats its bits, evaluates alike, and closes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import WORLD_SIZES, assert_bits_equal, assert_trees_bits_equal
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
from jaxdp.data import Corpus, EvaluationBatches, mean_loss
from jaxdp.errors import CheckpointError, CommunicatorClosed, ConfigError, DataError

MODEL = linear_model({"a": [0.5, -1.0, 0.25], "b": [0.1, 0.2, 0.3]})  # vocabulary of 3
BATCHES = [batch_of([[0, 1, 2]]), batch_of([[2, 2, 1]])]


@pytest.fixture(scope="module", params=["fused", "staged"])
def trainer(request: pytest.FixtureRequest) -> Iterator[jaxdp.DataParallelTrainer]:
    with jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(2, step_mode=request.param)) as trainer:
        trainer.step(BATCHES, 1)
        yield trainer


@pytest.fixture
def untouched(trainer: jaxdp.DataParallelTrainer) -> Iterator[jaxdp.DataParallelTrainer]:
    """Fails the test if the state changed or a collective was issued."""
    state, calls = saved_state(trainer), collective_calls(trainer)
    yield trainer
    assert_state(trainer, state)
    assert collective_calls(trainer) == calls
    assert trainer.step(BATCHES, 3).update == "applied"


# What a trainer is made of

@pytest.mark.parametrize("indices", [(8,), (0, 99)])
def test_a_device_that_is_not_there_is_refused_by_number(indices: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"device_indices must be below 8.*{indices[-1]}"):
        jaxdp.DataParallelTrainer(MODEL, seed=0, config=jaxdp.DataParallelConfig(device_indices=indices))


@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_a_parameter_that_is_no_narrow_float_is_refused_by_name(dtype: Any) -> None:
    model = dataclasses.replace(MODEL, init=lambda key: {"a": jnp.float32(1), "table": jnp.zeros(3, dtype)})
    with pytest.raises(ConfigError, match=rf"'table'.*{np.dtype(dtype).name}"):
        jaxdp.DataParallelTrainer(model, seed=0, config=config(1))


def test_a_compute_dtype_that_the_model_does_not_offer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compute_dtype.*'bfloat16'"):
        jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(1, compute_dtype="bfloat16"))


def test_parameters_come_from_the_seed_and_are_the_same_on_every_rank() -> None:
    model = dataclasses.replace(MODEL, init=lambda key: {"a": jax.random.normal(key), "b": jax.random.uniform(key)})
    digests = []
    for seed, world in ((0, 1), (0, 4), (1, 1)):
        with jaxdp.DataParallelTrainer(model, seed=seed, config=config(world)) as trainer:
            digests.append(trainer.parameter_digest())
            for rank in rank_parameters(trainer):
                assert_trees_bits_equal(rank, trainer.parameters())
    assert digests[0] == digests[1] != digests[2]


def test_ranks_follow_the_order_of_the_device_indices() -> None:
    tensors = []
    for indices in ((0, 1), (5, 3)):
        settings = jaxdp.DataParallelConfig(device_indices=indices, uneven_inputs="token-weighted")
        with jaxdp.DataParallelTrainer(MODEL, seed=0, config=settings) as trainer:
            metrics = trainer.step([batch_of([[0, 1, 2]]), batch_of([[2, 2, -1]])], 1)
            assert [device.id for device in trainer.devices] == list(indices)
            assert metrics.rank_tokens == (3, 2)
            tensors.append(saved_state(trainer))
    assert tensors[0].keys() == tensors[1].keys()
    for name, x in tensors[0].items():
        assert_bits_equal(tensors[1][name], x, name)


def test_two_trainers_in_one_process_give_the_same_bits_step_by_step() -> None:
    with contextlib.ExitStack() as stack:
        pair = [stack.enter_context(jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(4))) for _ in range(2)]
        for step in (1, 2, 3):
            inputs = [batch_of([[(rank + step) % 3, rank % 3]]) for rank in range(4)]
            first, second = (trainer.step(inputs, step) for trainer in pair)
            assert (first.loss, first.gradient_digest, first.parameter_digest) == (
                second.loss, second.gradient_digest, second.parameter_digest)


def test_the_plan_and_capabilities_are_those_in_force(trainer: jaxdp.DataParallelTrainer) -> None:
    assert trainer.plan == jaxdp.plan_buckets(trainer.parameters(), 25 << 20)
    assert trainer.capabilities is not None
    assert trainer.capabilities.reduction_order == "balanced_rank_tree"
    assert trainer.capabilities.world_size == trainer.parts == 2


# Batches

@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_batches_is_refused_with_both_numbers(untouched: jaxdp.DataParallelTrainer,
                                                                count: int) -> None:
    with pytest.raises(DataError, match=rf"2 batches.*got {count}\b"):
        untouched.step([BATCHES[0]] * count, 2)


@pytest.mark.parametrize("field", ["inputs", "targets"])
def test_a_missing_key_is_named_with_its_rank(untouched: jaxdp.DataParallelTrainer, field: str) -> None:
    bad = {name: x for name, x in BATCHES[1].items() if name != field}
    with pytest.raises(DataError, match=rf"rank 1\b.*'{field}'"):
        untouched.step([BATCHES[0], bad], 2)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.complex64])
def test_ids_that_are_no_integers_are_refused_with_their_dtype(untouched: jaxdp.DataParallelTrainer,
                                                               dtype: Any) -> None:
    bad = BATCHES[1] | {"inputs": np.ones((1, 3)).astype(dtype)}
    with pytest.raises(DataError, match=rf"rank 1\b.*{np.dtype(dtype).name}"):
        untouched.step([BATCHES[0], bad], 2)


@pytest.mark.parametrize("shape", [(3,), (1, 3, 1), (3, 1)])
def test_inputs_and_targets_of_other_shapes_are_refused(untouched: jaxdp.DataParallelTrainer,
                                                        shape: tuple[int, ...]) -> None:
    bad = BATCHES[1] | {"inputs": np.zeros(shape, np.int32)}
    with pytest.raises(DataError, match=rf"rank 1\b.*{', ?'.join(map(str, shape))}"):
        untouched.step([BATCHES[0], bad], 2)


@pytest.mark.parametrize(("field", "token"), [("inputs", 3), ("inputs", -1), ("targets", 3), ("targets", -2),
                                              ("inputs", 2**31 - 1), ("inputs", np.iinfo(np.int64).min)])
def test_an_id_outside_the_vocabulary_is_refused_with_its_place(untouched: jaxdp.DataParallelTrainer, field: str,
                                                                token: int) -> None:
    bad = {name: np.zeros((2, 3), np.int64) for name in ("inputs", "targets")}
    bad[field][1, 2] = token
    with pytest.raises(DataError, match=rf"rank 1, sample 1, position 2\b.* {token}\b.*vocabulary of 3\b"):
        untouched.step([{name: np.zeros((2, 3), np.int32) for name in bad}, bad], 2)


def test_an_id_outside_the_vocabulary_in_a_shard_names_the_rank_that_holds_it() -> None:
    with jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(2, shards=8)) as trainer:
        good, bad = batch_of([[0, 1]]), batch_of([[0, 3]])
        with pytest.raises(DataError, match=r"rank 1, sample 0, position 1\b.* 3\b"):
            trainer.step([good] * 6 + [bad] + [good], 1)


def test_ids_that_int32_cannot_hold_are_refused_where_no_vocabulary_is_known() -> None:
    model = dataclasses.replace(MODEL, vocab_size=None)
    with jaxdp.DataParallelTrainer(model, seed=0, config=config(1)) as trainer:
        wide = {name: np.array([[0, 1]], np.int64) for name in ("inputs", "targets")}
        trainer.step([wide], 1)
        wide["inputs"][0, 1] = 2**32  # would wrap around to 0
        with pytest.raises(DataError, match=r"rank 0\b.*int32"):
            trainer.step([wide], 2)


def test_the_callers_arrays_are_left_as_they_were(trainer: jaxdp.DataParallelTrainer) -> None:
    kept = [{name: x.copy() for name, x in batch.items()} for batch in BATCHES]
    trainer.step(BATCHES, 2)
    assert_trees_bits_equal(BATCHES, kept)


# State

def test_state_tensors_are_copies_that_no_later_step_changes(trainer: jaxdp.DataParallelTrainer) -> None:
    tensors, parameters = trainer.state_tensors(), trainer.parameters()
    kept = {name: x.copy() for name, x in tensors.items()}
    kept_parameters = jax.tree.map(np.copy, parameters)
    for step in (2, 3):
        trainer.step(BATCHES, step)
    assert_trees_bits_equal(tensors, kept)
    assert_trees_bits_equal(parameters, kept_parameters)


def test_loaded_tensors_are_neither_kept_nor_changed(trainer: jaxdp.DataParallelTrainer) -> None:
    tensors = saved_state(trainer)
    kept = {name: x.copy() for name, x in tensors.items()}
    trainer.load_state_tensors(tensors, 1)
    first = trainer.step(BATCHES, 2)
    assert_trees_bits_equal(tensors, kept)
    trainer.load_state_tensors(tensors, 1)
    for x in tensors.values():
        x.fill(0)  # the caller may use its arrays again
    assert trainer.step(BATCHES, 2).parameter_digest == first.parameter_digest


@pytest.mark.parametrize(("change", "message"), [
    ({"parameters/a": None}, "lacks.*'parameters/a'"), ({"parameters/z": np.float32(1)}, "unknown.*'parameters/z'"),
    ({"parameters/b": np.zeros((2,), np.float32)}, r"'parameters/b'.*float32\[2\]"),
    ({"parameters/b": np.float64(1)}, "'parameters/b'.*float64"), ({"updates": None}, "lacks.*'updates'")])
def test_a_tensor_that_does_not_fit_is_refused_by_name_and_nothing_is_loaded(
        untouched: jaxdp.DataParallelTrainer, change: dict[str, Any], message: str) -> None:
    tensors = {name: x + np.ones_like(x) for name, x in untouched.state_tensors().items()} | change
    with pytest.raises(CheckpointError, match=message):
        untouched.load_state_tensors({name: x for name, x in tensors.items() if x is not None}, 1)


# Evaluation

LOSSES = [0.0, 1.0, 2.0, 3.0, 4.0, 10.0]  # by token, at parameter 1


@pytest.fixture(scope="module")
def evaluators() -> Iterator[dict[int, jaxdp.DataParallelTrainer]]:
    model = linear_model({"p": LOSSES})
    with contextlib.ExitStack() as stack:
        yield {world: stack.enter_context(jaxdp.DataParallelTrainer(model, seed=0, config=config(world)))
               for world in WORLD_SIZES}


def samples(*tokens: int, sequences: int = 1) -> EvaluationBatches:
    """One sample for each of `tokens`: its loss is that of the token."""
    corpus = Corpus(name="samples", tokens=np.array([*tokens, 0], np.int32), sha256="", kind="tokens")
    return EvaluationBatches(corpus=corpus, context=1, sequences=sequences)


@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_samples_that_do_not_divide_are_counted_once_each(evaluators: Any, world: int, sequences: int) -> None:
    data = samples(1, 2, 3, 4, 5, sequences=sequences)
    batches = [batch for step in range(data.step_count(world)) for batch in data.batches(step, world)]
    loss_sum, tokens = evaluators[world].evaluate(batches)
    assert (loss_sum, tokens) == (20.0, 5)
    assert mean_loss([loss_sum], [tokens]) == 4.0  # with the first sample padded in again 3.5


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_fewer_samples_than_ranks_are_counted_once_each(evaluators: Any, world: int) -> None:
    assert evaluators[world].evaluate(samples(1, 2, 5).batches(0, 8)) == (13.0, 3)


def test_evaluation_weighs_by_tokens(evaluators: Any) -> None:
    batches = [batch_of([[1, 1, 1]]), batch_of([[5]])]
    assert {trainer.evaluate(batches) for trainer in evaluators.values()} == {(13.0, 4)}


def test_nothing_to_evaluate_is_no_loss_over_no_token(evaluators: Any) -> None:
    assert evaluators[2].evaluate([]) == (0.0, 0)
    assert evaluators[2].evaluate([batch_of([[-1, -1]])]) == (0.0, 0)


def test_the_metric_is_the_exact_sum_at_every_world_size() -> None:
    """Losses that cancel and stagnate: any other order or grouping of the batches would show."""
    model = linear_model({"p": [2.0**24, 1.0, -(2.0**24), 2.0**-20]})
    batches = [batch_of([[token, token]]) for token in (0, 1, 1, 3, 2, 3, 1)]
    results = set()
    for world in WORLD_SIZES:
        with jaxdp.DataParallelTrainer(model, seed=0, config=config(world)) as trainer:
            results.add(trainer.evaluate(batches))
    assert results == {(2 * (3 + 2 * 2.0**-20), 14)}


def test_evaluation_changes_nothing_and_calls_no_collective(untouched: jaxdp.DataParallelTrainer) -> None:
    loss_sum, tokens = untouched.evaluate(BATCHES)
    assert math.isfinite(loss_sum)
    assert tokens == 6


@pytest.mark.parametrize("bad", [batch_of([[0], [3]]), {"inputs": np.zeros((1, 1), np.int32)},
                                 {name: np.zeros((1, 1), np.float32) for name in ("inputs", "targets")}],
                         ids=["id", "key", "dtype"])
def test_evaluation_refuses_what_a_step_refuses(untouched: jaxdp.DataParallelTrainer, bad: Any) -> None:
    with pytest.raises(DataError, match="rank 1"):
        untouched.evaluate([BATCHES[0], bad])


# The end

@pytest.mark.parametrize("fields", [{}, {"step_mode": "staged"}, {"shards": 2}], ids=["fused", "staged", "shards"])
def test_a_step_after_close_is_an_error_and_close_may_come_twice(fields: dict[str, Any]) -> None:
    trainer = jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(2, optimizer=optax.sgd(1.0), **fields))
    trainer.step(BATCHES, 1)
    digest = trainer.parameter_digest()
    trainer.close()
    trainer.close()
    with pytest.raises(CommunicatorClosed, match="closed"):
        trainer.step(BATCHES, 2)
    assert trainer.parameter_digest() == digest  # what was learned can still be read and saved
    assert trainer.evaluate(BATCHES)[1] == 6
    assert trainer.state_tensors()["updates"] == 1


def test_a_step_after_close_is_an_error_without_a_communicator_too() -> None:
    trainer = jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(2, reducer="psum"))
    trainer.close()
    with pytest.raises(CommunicatorClosed, match="closed"):
        trainer.step(BATCHES, 1)


def test_a_trainer_closed_before_its_first_step_refuses_it() -> None:
    with jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(2)) as trainer:
        pass
    with pytest.raises(CommunicatorClosed):
        trainer.step(BATCHES, 1)


def test_leaving_by_an_error_passes_the_error_on_and_closes() -> None:
    with pytest.raises(ZeroDivisionError), jaxdp.DataParallelTrainer(MODEL, seed=0, config=config(1)) as trainer:
        raise ZeroDivisionError
    with pytest.raises(CommunicatorClosed):
        trainer.step(BATCHES[:1], 1)
