"""With shards every loss, digest and state tensor has the same bits at world 1, 2, 4 and 8."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from helpers import assert_trees_bits_equal
from training_helpers import (
    assert_state,
    config,
    linear_model,
    perceptron,
    ragged_batch,
    rank_parameters,
    saved_state,
    tiny_batch,
)

import jaxdp
from jaxdp.training.shards import SiblingTree

SHARDS = 8
STEPS = (1, 2, 3)

State = Mapping[str, np.ndarray]
TrainerAt = Callable[[int], jaxdp.DataParallelTrainer]


def hard_trainer(world: int) -> jaxdp.DataParallelTrainer:
    """`tiny` with what could tell world sizes apart: dropout, microbatches, clipping, uneven tokens, small buckets."""
    settings = config(world, shards=SHARDS, accumulation_steps=2, maximum_gradient_norm=0.2,
                      uneven_inputs="token-weighted", maximum_bucket_bytes=1 << 10,
                      optimizer=jaxdp.AdamWConfig(learning_rate=5e-3, weight_decay=0.1, warmup_steps=2))
    return jaxdp.DataParallelTrainer(jaxdp.models.get("tiny", dropout=0.25), seed=3, config=settings)


@pytest.fixture(scope="module")
def trainer_at() -> Iterator[TrainerAt]:
    """The trainer of a world size, made when it is first asked for."""
    made: dict[int, jaxdp.DataParallelTrainer] = {}
    with contextlib.ExitStack() as stack:
        def get(world: int) -> jaxdp.DataParallelTrainer:
            if world not in made:
                made[world] = stack.enter_context(hard_trainer(world))
            return made[world]

        yield get


@pytest.fixture(scope="module")
def initial(trainer_at: TrainerAt) -> State:
    """The state before the first step; tests share the trainers and start from here."""
    return saved_state(trainer_at(1))


@pytest.fixture(scope="module")
def at_one(trainer_at: TrainerAt, initial: State) -> list[jaxdp.StepMetrics]:
    return run(trainer_at(1), initial, STEPS)


@pytest.fixture(scope="module")
def final(trainer_at: TrainerAt, at_one: list[jaxdp.StepMetrics]) -> State:
    del at_one
    return saved_state(trainer_at(1))


def run(trainer: jaxdp.DataParallelTrainer, state: State, steps: Any) -> list[jaxdp.StepMetrics]:
    trainer.load_state_tensors(state, steps[0] - 1)
    return [trainer.step([ragged_batch(part, step) for part in range(SHARDS)], step) for step in steps]


def invariant(metrics: jaxdp.StepMetrics) -> tuple[Any, ...]:
    return (metrics.step, metrics.loss, metrics.tokens, metrics.learning_rate, metrics.gradient_norm,
            metrics.gradient_digest, metrics.parameter_digest)


def test_the_run_compared_clips_drops_and_weighs(at_one: list[jaxdp.StepMetrics], trainer_at: TrainerAt,
                                                 initial: State, final: State) -> None:
    """The canary of the tests below: each feature is really at work in it."""
    del final  # taken before this test moves the trainer
    assert all(metrics.gradient_norm > 0.2 for metrics in at_one)
    shards = [np.count_nonzero(ragged_batch(part, 1)["targets"] != -1) for part in range(SHARDS)]
    assert len(set(shards)) > 1
    assert at_one[0].tokens == sum(shards)
    trainer_at(1).load_state_tensors(initial, 0)
    again = trainer_at(1).step([ragged_batch(part, 1) for part in range(SHARDS)], 2)
    assert again.loss != at_one[0].loss  # another step, another dropout mask


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_step_has_the_same_bits_at_every_world_size(world: int, trainer_at: TrainerAt, initial: State,
                                                          at_one: list[jaxdp.StepMetrics], final: State) -> None:
    metrics = run(trainer_at(world), initial, STEPS)
    assert list(map(invariant, metrics)) == list(map(invariant, at_one))
    assert_state(trainer_at(world), final)
    for rank in rank_parameters(trainer_at(world))[1:]:
        assert_trees_bits_equal(rank, trainer_at(world).parameters())


def test_a_run_goes_on_at_another_world_size(trainer_at: TrainerAt, initial: State, at_one: list[jaxdp.StepMetrics],
                                             final: State) -> None:
    state, metrics = initial, []
    for step, world in ((1, 8), (2, 2), (3, 4)):
        metrics += run(trainer_at(world), state, [step])
        state = trainer_at(world).state_tensors()
    assert list(map(invariant, metrics)) == list(map(invariant, at_one))
    assert_state(trainer_at(4), final)


def test_nothing_in_the_state_names_the_world(trainer_at: TrainerAt) -> None:
    one, eight = ({name: (x.shape, x.dtype) for name, x in trainer_at(world).state_tensors().items()}
                  for world in (1, 8))
    assert one == eight


def test_the_evaluation_loss_is_one_number_at_world_1_and_8(trainer_at: TrainerAt, final: State) -> None:
    results = set()
    for trainer in (trainer_at(1), trainer_at(8)):
        trainer.load_state_tensors(final, 3)
        results.add(trainer.evaluate([ragged_batch(part, 9) for part in range(5)]))
    assert len(results) == 1


def shard_gradients(parameters: Any, batches: list[Any]) -> tuple[list[Any], list[np.ndarray]]:
    """Each shard's gradient of the summed loss and its weight, by a plain `jit`."""
    model = perceptron()

    @jax.jit
    def gradient(parameters: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda p: model.loss(p, batch, None), has_aux=True)(parameters)

    results = [jax.device_get(gradient(parameters, batch)) for batch in batches]
    return [grads for _, grads in results], [np.array([loss, weight], np.float32) for (loss, weight), _ in results]


@pytest.fixture(scope="module")
def four_shards() -> Iterator[jaxdp.DataParallelTrainer]:
    settings = config(2, shards=4, uneven_inputs="token-weighted")
    with jaxdp.DataParallelTrainer(perceptron(), seed=0, config=settings) as trainer:
        yield trainer


def test_the_gradient_is_the_tree_of_the_shards_gradients_divided_once(
        four_shards: jaxdp.DataParallelTrainer) -> None:
    batches = [ragged_batch(part, 1, rows=3) for part in range(4)]
    grads, stats = shard_gradients(four_shards.parameters(), batches)
    loss, weight = jaxdp.tree_sum(np.stack(stats))
    mean = jax.tree.map(lambda *leaves: jaxdp.tree_sum(np.stack(leaves)) / weight, *grads)
    in_order = jax.tree.map(lambda a, b, c, d: (((a + b) + c) + d) / weight, *grads)
    metrics = four_shards.step(batches, 1)
    assert metrics.gradient_digest == jaxdp.tree_digest(mean) != jaxdp.tree_digest(in_order)
    assert metrics.loss == float(loss / weight)


def test_a_rank_reports_the_loss_and_tokens_of_its_shards(four_shards: jaxdp.DataParallelTrainer) -> None:
    batches = [ragged_batch(part, 2) for part in range(4)]
    _, stats = shard_gradients(four_shards.parameters(), batches)
    metrics = four_shards.step(batches, 2)
    halves = [jaxdp.tree_sum(np.stack(stats[:2])), jaxdp.tree_sum(np.stack(stats[2:]))]
    assert metrics.rank_tokens == tuple(int(weight) for _, weight in halves)
    assert metrics.rank_losses == tuple(float(loss / weight) for loss, weight in halves)


def test_all_shards_run_one_compiled_executable(four_shards: jaxdp.DataParallelTrainer) -> None:
    step: Any = four_shards._step
    four_shards.step([tiny_batch(part, 3) for part in range(4)], 3)
    compiled = len(step._gradient._compiled)
    four_shards.step([tiny_batch(part, 4) for part in range(4)], 4)
    assert len(step._gradient._compiled) == compiled
    assert len(step._gradient._loaded) == compiled * 2  # the same on both devices


@pytest.mark.parametrize("world", [1, 2])
def test_exact_sums_agree_between_shards_and_ranks(world: int) -> None:
    """Shards are equal parts of the global batch, in order: part p of rank r is shard r * V / W + p."""
    model = linear_model({"p": [1.0, 16.0, 256.0, 4096.0]})
    batches = [{"inputs": np.full((1, part + 1), part, np.int32), "targets": np.zeros((1, part + 1), np.int32)}
               for part in range(4)]
    settings = config(world, shards=4, uneven_inputs="token-weighted")
    with jaxdp.DataParallelTrainer(model, seed=0, config=settings) as trainer:
        metrics = trainer.step(batches, 1)
    assert metrics.rank_tokens == {1: (10,), 2: (3, 7)}[world]
    assert metrics.gradient_norm == np.float32(1 + 32 + 768 + 16384) / np.float32(10)


def combine(count: int) -> tuple[str, int]:
    """The expression of `count` leaves as a sibling tree adds them, and the most values alive."""
    tree = SiblingTree(lambda left, right: f"({left}+{right})")
    most = 0
    for leaf in range(count):
        tree.push(str(leaf))
        most = max(most, tree.alive)
    return tree.root(), most


def balanced(leaves: list[str]) -> str:
    half = len(leaves) // 2
    return leaves[0] if not half else f"({balanced(leaves[:half])}+{balanced(leaves[half:])})"


@pytest.mark.parametrize("levels", range(8))
def test_a_sibling_tree_is_balanced_and_holds_few_values(levels: int) -> None:
    expression, most = combine(1 << levels)
    assert expression == balanced([str(leaf) for leaf in range(1 << levels)])
    assert most <= levels + 1


@pytest.mark.parametrize("count", [0, 3, 6, 7])
def test_a_sibling_tree_of_another_number_has_no_root(count: int) -> None:
    with pytest.raises(ValueError, match=rf"{count} leaves.*power of two"):
        combine(count)
