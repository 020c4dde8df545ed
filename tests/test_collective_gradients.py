"""Gradients flow through collectives: all_gather and reduce_scatter are each other's transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, WORLD_SIZES, assert_bits_equal, cancelling
from jax import lax
from ranks import SPMD, TRANSPORTS, Spmd, Transport, open_collective, per_rank, reference

TRANSPOSE = {"all_reduce": "all_reduce", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
LENGTH = {"all_reduce": (1, 1), "all_gather": (1, None), "reduce_scatter": (None, 1)}  # input, output; None: world size

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def pulled_back(function: Callable[..., Any], x: Any, cotangent: Any) -> Any:
    """The gradient for `x` of `sum(cotangent * function(x))`."""
    return jax.vjp(function, x)[1](cotangent)[0]


@pytest.mark.parametrize("operation", TRANSPOSE)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_gradient_is_the_transposed_collective_bit_for_bit(
        world_size: int, operation: str, transport: Transport) -> None:
    inputs, outputs = (6 * (world_size if n is None else n) for n in LENGTH[operation])
    xs = [cancelling(world_size, inputs, dtype, 1) for dtype in DTYPES]
    cotangents = [cancelling(world_size, outputs, dtype, 2) for dtype in DTYPES]
    with open_collective(world_size, transport) as collective:
        gradients = per_rank(lambda xs, cotangents: [
            pulled_back(getattr(collective, operation), x, c) for x, c in zip(xs, cotangents, strict=True)
        ], world_size)(xs, cotangents)
    for cotangent, gradient in zip(cotangents, gradients, strict=True):
        assert_bits_equal(gradient, reference(TRANSPOSE[operation], cotangent), f"{operation} {cotangent.dtype}")


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_lanes_of_one_call_have_gradients_of_their_own(operation: str, transport: Transport) -> None:
    inputs, outputs = (3 * (4 if n is None else n) for n in LENGTH[operation])
    xs = [cancelling(4, inputs, dtype, 1).reshape(4, -1, 3).repeat(4, axis=1) for dtype in DTYPES]
    cotangents = [cancelling(4, outputs, dtype, 2).reshape(4, -1, 3).repeat(4, axis=1) for dtype in DTYPES]
    with open_collective(4, transport) as collective:
        gradients = per_rank(
            lambda xs, cotangents: pulled_back(getattr(collective, f"{operation}_many"), xs, cotangents), 4,
        )(xs, cotangents)
    for cotangent, gradient in zip(cotangents, gradients, strict=True):
        assert_bits_equal(gradient, reference(TRANSPOSE[operation], cotangent))


def test_the_gradient_of_the_gradient_is_the_collective_itself(transport: Transport) -> None:
    x = cancelling(4, 8, "float32")
    zeros = np.zeros((4, 2), np.float32)
    with open_collective(4, transport) as collective:
        scattered = per_rank(lambda x, zeros: pulled_back(
            lambda c: pulled_back(collective.reduce_scatter, x, c), zeros, x), 4)(x, zeros)
    assert_bits_equal(scattered, reference("reduce_scatter", x))


@pytest.mark.parametrize("spmd", SPMD)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_pass_through_a_scan_of_collectives(checkpointed: bool, spmd: Spmd, transport: Transport) -> None:
    """Per turn h becomes T(w * h); each rank's loss is c . h after three turns. Small integers: every sum is exact."""
    w, h, c = np.random.default_rng(0).integers(-2, 3, (3, 4, 5)).astype(np.float32)
    with open_collective(4, transport) as collective:
        def turn(h: Any, w: Any) -> tuple[Any, None]:
            return collective.all_reduce(w * h), None

        def loss(w: Any, h: Any, c: Any) -> Any:
            body = jax.checkpoint(turn) if checkpointed else turn
            return jnp.sum(c * lax.scan(body, h, jnp.stack([w, w, w]))[0])

        gradient = per_rank(jax.grad(loss), 4, spmd)(w, h, c)
        made = [collective.calls(rank) for rank in range(4)]
    assert_bits_equal(gradient, _scan_gradient(w, h, c))
    assert len(set(made)) == 1


def _scan_gradient(w: np.ndarray, h: np.ndarray, c: np.ndarray) -> np.ndarray:
    """NumPy's reverse pass of `h = T(w * h)`, three times: dw = T(dh) * h, dh = T(dh) * w."""
    states = [h]
    for _ in range(3):
        states.append(reference("all_reduce", w * states[-1]))
    by_turn, dh = [], c
    for state in reversed(states[:3]):
        total = reference("all_reduce", dh)
        by_turn.append(total * state)
        dh = total * w
    return (by_turn[0] + by_turn[1]) + by_turn[2]


def test_a_sharded_layer_has_the_gradient_of_the_whole_layer(transport: Transport) -> None:
    """Weights gathered, used, and their gradient scattered back, against NumPy in float64."""
    generator = np.random.default_rng(0)
    inputs, targets = generator.standard_normal((4, 3, 8)), generator.standard_normal((4, 3, 2))
    weights = generator.standard_normal((8, 2))
    with open_collective(4, transport) as collective:
        def loss(shard: Any, inputs: Any, targets: Any) -> Any:
            return jnp.sum((inputs @ collective.all_gather(shard) - targets) ** 2)

        gradient = per_rank(jax.grad(jax.checkpoint(loss)), 4)(
            *(array.astype(np.float32) for array in (weights.reshape(4, 2, 2), inputs, targets)))
    expected = np.einsum("rbi,rbo->io", inputs, 2 * (inputs @ weights - targets)).reshape(4, 2, 2)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_an_integer_gather_and_a_stopped_gradient_add_nothing(transport: Transport) -> None:
    x = cancelling(4, 8, "float32")
    with open_collective(4, transport) as collective:
        def loss(x: Any) -> Any:
            positions = collective.all_gather(jnp.arange(2))
            return jnp.sum(x * positions) + jnp.sum(lax.stop_gradient(collective.all_reduce(x)))

        gradient = per_rank(jax.grad(loss), 4)(x)
    assert_bits_equal(gradient, np.tile(np.arange(2, dtype=np.float32), (4, 4)))
