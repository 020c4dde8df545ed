"""One executable, compiled once, runs on every device with the same bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_trees_bits_equal, cancelling

from jaxdp.collectives import native
from jaxdp.collectives.operations import tree_sum_many
from jaxdp.training.spmd import RowProgram
from jaxdp.tree import tree_sum


def attention_like(x: jax.Array, key: jax.Array) -> dict[str, Any]:
    """Products, reductions and random numbers: what fusion could round in another way."""
    noise = jax.random.normal(jax.random.wrap_key_data(key), x.shape)
    scores = jax.nn.softmax(x @ x.T + noise @ noise.T)
    return {"y": scores @ x, "total": jnp.sum(scores * 3 + 1)}


def arguments(device: jax.Device) -> tuple[Any, Any]:
    x = np.random.default_rng(1).standard_normal((17, 9)).astype(np.float32)
    return jax.device_put(x, device), jax.device_put(np.array([3, 4], np.uint32), device)


@pytest.fixture(scope="module")
def program() -> RowProgram:
    """Compiled for device 0; every other device gets a loaded copy."""
    program = RowProgram(attention_like)
    program(None, jax.devices()[0], *arguments(jax.devices()[0]))
    return program


@pytest.mark.parametrize("index", [1, 5, 7])
def test_a_loaded_copy_runs_where_it_was_loaded_with_the_same_bits(program: RowProgram, index: int) -> None:
    first, device = jax.devices()[0], jax.devices()[index]
    expected = program(None, first, *arguments(first))
    result = program(None, device, *arguments(device))
    assert {leaf.device for leaf in jax.tree.leaves(result)} == {device}
    assert_trees_bits_equal(jax.device_get(result), jax.device_get(expected))


def test_a_loaded_copy_refuses_arguments_of_another_device(program: RowProgram) -> None:
    program(None, jax.devices()[2], *arguments(jax.devices()[2]))
    with pytest.raises(ValueError, match="device"):
        program(None, jax.devices()[2], *arguments(jax.devices()[0]))


def test_a_copy_of_a_program_with_a_native_call_keeps_the_tree() -> None:
    native.load()
    x = cancelling(4, 33, "float32")
    program = RowProgram(lambda *rows: tree_sum_many([[row] for row in rows])[0])
    for device in jax.devices()[:3]:
        total = program(None, device, *(jax.device_put(row, device) for row in x))
        assert_bits_equal(jax.device_get(total), tree_sum(x))


def test_a_donated_argument_is_donated_on_every_device() -> None:
    program = RowProgram(lambda x: x + 1, donate=(0,))
    for device in jax.devices()[:2]:
        x = jax.device_put(np.zeros(1024, np.float32), device)
        jax.block_until_ready(program(None, device, x))
        assert x.is_deleted()


def test_a_row_program_is_traced_once_for_each_set_of_shapes() -> None:
    traces: list[tuple[int, ...]] = []

    def double(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return x * 2

    program = RowProgram(double)
    for _ in range(2):
        for device in jax.devices()[:4]:
            for shape in ((3,), (2, 2)):
                result = program(shape, device, jax.device_put(np.ones(shape, np.float32), device))
                assert (result.shape, result.device) == (shape, device)
    assert traces == [(3,), (2, 2)]
