"""The optimizer's numbers by hand, its step count, its schedule, and float32 masters of narrow parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_bits_equal, bits
from training_helpers import assert_state, batch_of, config, linear_model, rank_parameters, saved_state

import jaxdp
from jaxdp.training.optimizer import make_optimizer

DECAYED = (0x3F7FB7E9, 0x3F7FC95B, 0x3F7FAC50)  # 0.9989000001, 0.9991662136, 0.9987230559
MASKED = (0.9990000001, 0.9993661036, 0.9990228625)
GRADIENTS = [0.1, -0.2, 0.3, 0.0]  # by token


def constant(token: int) -> list[dict[str, np.ndarray]]:
    """Both ranks hold this token alone: its gradient is the mean."""
    return [batch_of([[token]])] * 2


def trainer_of(model: jaxdp.Model, optimizer: Any, **fields: Any) -> jaxdp.DataParallelTrainer:
    return jaxdp.DataParallelTrainer(model, seed=0, config=config(2, optimizer=optimizer, **fields))


def assert_within_2_ulp(actual: np.float32, expected: Any) -> None:
    distance = int(bits(actual)) - int(bits(expected))
    assert abs(distance) <= 2, f"{actual} (0x{int(bits(actual)):08X}) is {distance} ulp from {expected}"


def values(trainer: jaxdp.DataParallelTrainer, name: str = "p") -> np.float32:
    """The parameter, after a check that both ranks hold its bits."""
    first, second = rank_parameters(trainer)
    assert_trees_bits_equal(first, second)
    return np.float32(first[name])


@pytest.mark.parametrize("step_mode", ["fused", "staged"])
def test_adamw_decays_the_parameter_and_not_the_gradient(step_mode: str) -> None:
    adamw = jaxdp.AdamWConfig(learning_rate=1e-3, weight_decay=0.1)
    with trainer_of(linear_model({"p": GRADIENTS}), adamw, step_mode=step_mode) as trainer:
        for step, expected in enumerate(DECAYED, 1):
            trainer.step(constant(step - 1), step)
            assert_within_2_ulp(values(trainer), np.uint32(expected).view(np.float32))


def test_a_masked_parameter_does_not_decay_and_its_neighbour_does() -> None:
    adamw = optax.adamw(1e-3, weight_decay=0.1, mask={"decayed": True, "masked": False})
    with trainer_of(linear_model({"decayed": GRADIENTS, "masked": GRADIENTS}), adamw) as trainer:
        for step in (1, 2, 3):
            trainer.step(constant(step - 1), step)
            assert_within_2_ulp(values(trainer, "decayed"), np.uint32(DECAYED[step - 1]).view(np.float32))
            assert_within_2_ulp(values(trainer, "masked"), np.float32(MASKED[step - 1]))


def test_epsilon_is_added_to_the_root_of_the_corrected_moment() -> None:
    with trainer_of(linear_model({"p": [1e-8]}), jaxdp.AdamWConfig(learning_rate=1.0)) as trainer:
        trainer.step(constant(0), 1)
        assert 1.0 - float(values(trainer)) == pytest.approx(0.5, abs=1e-5)  # inside the root 1e-4, uncorrected 0.03


def test_a_thousand_equal_updates_move_by_the_rate_each_and_narrow_parameters_have_a_float32_master() -> None:
    model = linear_model({"wide": [0.1], "narrow": [0.1]}, dtypes={"narrow": jnp.bfloat16})
    adamw = jaxdp.AdamWConfig(learning_rate=1e-3)
    with trainer_of(model, adamw, parameter_check_interval=0) as trainer:
        assert {x.dtype for x in trainer.parameters().values()} == {np.dtype(np.float32)}
        for step in range(1, 1001):
            trainer.step(constant(0), step)
            if step == 257:
                for name in ("wide", "narrow"):
                    assert float(values(trainer, name)) == pytest.approx(0.7430000257, abs=2e-5)
        for name in ("wide", "narrow"):
            assert abs(float(values(trainer, name))) < 1e-4
        counts = {name: x for name, x in trainer.state_tensors().items() if name.endswith("count") or name == "updates"}
    assert len(counts) >= 2
    for name, count in counts.items():
        assert (count.dtype.kind, int(count)) == ("i", 1000), name


WARM_UP = jaxdp.AdamWConfig(learning_rate=1e-3, warmup_steps=10)
WARM_UP_MODEL = linear_model({"p": [0.1]})


@pytest.fixture(scope="module")
def warming() -> Iterator[jaxdp.DataParallelTrainer]:
    with trainer_of(WARM_UP_MODEL, WARM_UP) as trainer:
        yield trainer


def test_the_schedule_counts_from_zero_and_the_logged_rate_is_the_one_used(warming: jaxdp.DataParallelTrainer) -> None:
    rates, moved, last = [], [], values(warming)
    for step in range(1, 14):
        rates.append(warming.step(constant(0), step).learning_rate)
        moved.append(float(last - values(warming)))
        last = values(warming)
        if step <= 3:
            assert float(last) == pytest.approx([1.0, 0.9999, 0.9997][step - 1], abs=1.2e-7)
    assert moved[0] == 0
    assert rates == pytest.approx([min(1.0, n / 10) * 1e-3 for n in range(13)], rel=1e-6)
    assert moved == pytest.approx(rates, abs=3e-7)  # under a constant gradient Adam moves by the rate


def test_a_restart_neither_repeats_nor_skips_a_rate(warming: jaxdp.DataParallelTrainer) -> None:
    fresh = {name: np.zeros_like(x) for name, x in warming.state_tensors().items()}
    warming.load_state_tensors(fresh | {"parameters/p": np.array(1, np.float32)}, 0)
    for step in range(1, 6):
        warming.step(constant(0), step)
    saved = saved_state(warming)
    assert {int(x) for name, x in saved.items() if name.endswith("count") or name == "updates"} == {5}
    uninterrupted = warming.step(constant(0), 6)
    with trainer_of(WARM_UP_MODEL, WARM_UP) as resumed:
        resumed.load_state_tensors(saved, 5)
        metrics = resumed.step(constant(0), 6)
        assert metrics.learning_rate == uninterrupted.learning_rate == pytest.approx(5e-4, rel=1e-6)
        assert metrics.parameter_digest == uninterrupted.parameter_digest
        assert_state(resumed, saved_state(warming))


def test_a_rate_that_cannot_be_known_is_none() -> None:
    with trainer_of(WARM_UP_MODEL, optax.sgd(0.5)) as trainer:
        assert trainer.step(constant(0), 1).learning_rate is None
        assert float(values(trainer)) == pytest.approx(1 - 0.5 * 0.1)


def test_the_cosine_reaches_its_minimum_one_update_after_decay_steps() -> None:
    optimizer = make_optimizer(jaxdp.AdamWConfig(learning_rate=1e-3, warmup_steps=2, decay_steps=6,
                                                 minimum_learning_rate=1e-4))
    rates = [float(optimizer.learning_rate(updates)) for updates in range(9)]
    cosine = [1e-4 + 9e-4 * (1 + math.cos(math.pi * done / 4)) / 2 for done in range(5)]
    assert rates == pytest.approx([0, 5e-4, *cosine, 1e-4, 1e-4], rel=1e-5, abs=1e-12)


def test_clipping_scales_the_mean_gradient_to_the_limit_and_reports_the_norm_before_it() -> None:
    model = linear_model({"a": [3.0, 0.3], "b": [4.0, 0.4]})
    with trainer_of(model, optax.sgd(1.0), maximum_gradient_norm=1.0) as trainer:
        assert trainer.step(constant(0), 1).gradient_norm == 5.0
        assert [float(values(trainer, name)) for name in "ab"] == pytest.approx([1 - 0.6, 1 - 0.8], abs=1e-6)
        assert trainer.step(constant(1), 2).gradient_norm == pytest.approx(0.5)
        assert [float(values(trainer, name)) for name in "ab"] == pytest.approx([0.4 - 0.3, 0.2 - 0.4], abs=1e-6)
