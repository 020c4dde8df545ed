"""Two ranks do what one device does with the whole batch: the step against plain JAX and optax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import assert_trees_bits_equal
from training_helpers import TINY_ADAMW, TINY_SGD, Record, tiny_batch, tiny_run

import jaxdp

TOLERANCE = 2e-5
RUNS = [("fused", "tree", "adamw"), ("fused", "psum", "adamw"), ("fused", "per-parameter", "adamw"),
        ("staged", "tree", "adamw"), ("staged", "per-parameter", "adamw"), ("fused", "tree", "sgd"),
        ("staged", "psum", "sgd")]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def run(request: pytest.FixtureRequest) -> tuple[Record, str]:
    step_mode, reducer, optimizer = request.param
    return tiny_run(step_mode, reducer, optimizer), optimizer


def reference_transformation(optimizer: str) -> optax.GradientTransformation:
    if optimizer == "sgd":
        return TINY_SGD
    return optax.adamw(TINY_ADAMW.learning_rate, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0)


@functools.cache
def reference(optimizer: str) -> tuple[list[Any], list[float], list[float]]:
    """Parameters, losses and gradient norms of three updates with the ranks' batches as one."""
    transformation = reference_transformation(optimizer)
    model = jaxdp.models.get("tiny")

    def mean_loss(parameters: Any, batch: Any) -> Any:
        loss_sum, weight = model.loss(parameters, batch, None)
        return loss_sum / weight

    @jax.jit
    def step(parameters: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(mean_loss)(parameters, batch)
        changes, state = transformation.update(grads, state, parameters)
        return optax.apply_updates(parameters, changes), state, loss, optax.tree.norm(grads)

    parameters = jax.tree.map(jax.numpy.asarray, tiny_run(optimizer=optimizer).initial)
    state = transformation.init(parameters)
    history, losses, norms = [], [], []
    for number in (1, 2, 3):
        ranks = [tiny_batch(rank, number) for rank in range(2)]
        batch = {name: np.concatenate([rank[name] for rank in ranks]) for name in ranks[0]}
        parameters, state, loss, norm = step(parameters, state, batch)
        history.append(jax.device_get(parameters))
        losses.append(float(loss))
        norms.append(float(norm))
    return history, losses, norms


def test_every_step_has_the_parameters_of_one_device_with_the_global_batch(run: tuple[Record, str]) -> None:
    record, optimizer = run
    expected, _, _ = reference(optimizer)
    for ranks, parameters in zip(record.parameters, expected, strict=True):
        assert jax.tree.structure(ranks[0]) == jax.tree.structure(parameters)
        worst = jax.tree.map(lambda got, want: np.max(np.abs(got - want)), ranks[0], parameters)
        assert max(jax.tree.leaves(worst)) <= TOLERANCE


def test_every_step_reports_the_loss_and_gradient_norm_of_the_global_batch(run: tuple[Record, str]) -> None:
    record, optimizer = run
    _, losses, norms = reference(optimizer)
    np.testing.assert_allclose([metrics.loss for metrics in record.metrics], losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose([metrics.gradient_norm for metrics in record.metrics], norms, rtol=0, atol=TOLERANCE)


def test_ranks_hold_the_same_bits_after_every_step(run: tuple[Record, str]) -> None:
    record, _ = run
    for ranks, metrics in zip(record.parameters, record.metrics, strict=True):
        assert_trees_bits_equal(ranks[1], ranks[0])
        assert (metrics.parameter_check, metrics.maximum_parameter_difference) == ("ok", 0.0)


def test_the_updates_are_far_larger_than_the_tolerance(run: tuple[Record, str]) -> None:
    record, _ = run
    moved = jax.tree.map(lambda new, old: np.max(np.abs(new - old)), record.parameters[-1][0], record.initial)
    assert max(jax.tree.leaves(moved)) > 100 * TOLERANCE


def test_all_runs_start_from_the_same_bits() -> None:
    first = tiny_run().initial
    for step_mode, reducer, optimizer in RUNS:
        assert_trees_bits_equal(tiny_run(step_mode, reducer, optimizer).initial, first)
