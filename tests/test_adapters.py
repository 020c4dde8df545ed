"""A user's flax modules as models: order, dropout, gradients, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_bits_equal, assert_trees_bits_equal

import jaxdp.models
from jaxdp.errors import ConfigError
from jaxdp.leaves import leaf_names

INPUTS = np.array([[1, 2, 3], [4, 0, 1]], np.int32)
TARGETS = np.array([[2, 3, -1], [0, 1, 4]], np.int32)
BATCH = {"inputs": INPUTS, "targets": TARGETS}
KEYS = jax.random.split(jax.random.key(7), 2)


class NnxLanguageModel(nnx.Module):
    """Attributes named so that no sorted order is their order; twelve layers, so that "10" < "2" in text."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(5, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(12)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = self.token(inputs)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dropout(x))


class LinenLanguageModel(nn.Module):
    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Embed(5, 4, name="token")(inputs)
        for index in range(3):
            x = nn.Dense(4, use_bias=False, name=f"layer_{9 - index}")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "m"))
        return nn.Dense(5, name="a_head", kernel_init=boxed)(x)


NNX_NAMES = ("token/embedding", *(f"layers/{i}/kernel" for i in range(12)), "head/kernel", "head/bias")
LINEN_NAMES = ("token/embedding", *(f"layer_{9 - i}/kernel" for i in range(3)), "a_head/kernel", "a_head/bias")


@functools.cache
def nnx_model() -> jaxdp.models.Model:
    return jaxdp.models.from_nnx(NnxLanguageModel, name="nnx")


@functools.cache
def linen_model() -> jaxdp.models.Model:
    return jaxdp.models.from_linen(LinenLanguageModel(), name="linen", context=3, train_kwargs={"train": True})


ADAPTED = pytest.mark.parametrize(("make", "names"), [(nnx_model, NNX_NAMES), (linen_model, LINEN_NAMES)],
                                  ids=["nnx", "linen"])


@ADAPTED
def test_parameters_keep_the_order_of_their_definition(make: Any, names: tuple[str, ...]) -> None:
    shapes = jax.eval_shape(make().init, jax.random.key(0))
    assert leaf_names(shapes) == names
    assert leaf_names(jax.tree.map(lambda leaf: leaf, shapes)) == names  # a trip through flatten keeps it


@ADAPTED
def test_the_gradient_is_that_of_the_module_s_own_cross_entropy(make: Any, names: tuple[str, ...]) -> None:
    model = make()
    params = model.init(jax.random.key(0))
    assert {type(leaf).__name__ for leaf in jax.tree.leaves(params)} == {"ArrayImpl"}

    def reference(params: Any) -> jax.Array:
        logs = jax.nn.log_softmax(model.logits(params, INPUTS))
        picked = jnp.take_along_axis(logs, jnp.maximum(TARGETS, 0)[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(TARGETS == -1, 0, picked))

    (loss_sum, weight), actual = jax.jit(jax.value_and_grad(lambda p: model.loss(p, BATCH, None), has_aux=True))(params)
    expected_sum, expected = jax.jit(jax.value_and_grad(reference))(params)
    assert (float(weight), weight.dtype, loss_sum.dtype) == (5.0, jnp.float32, jnp.float32)
    np.testing.assert_allclose(loss_sum, expected_sum, rtol=1e-6)
    for name, leaf, expected_leaf in zip(names, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-5, atol=1e-7, err_msg=name)
        assert np.any(np.asarray(leaf)), name


@ADAPTED
def test_dropout_follows_the_key_and_is_off_without_one(make: Any, names: tuple[str, ...]) -> None:
    del names
    model = make()
    params, loss = model.init(jax.random.key(0)), jax.jit(model.loss)
    first, again, other, off = (float(loss(params, BATCH, key)[0]) for key in (KEYS[0], KEYS[0], KEYS[1], None))
    assert first == again
    assert len({first, other, off}) == 3


@ADAPTED
def test_initialisation_repeats_for_a_key_and_differs_between_keys(make: Any, names: tuple[str, ...]) -> None:
    del names
    init = jax.jit(make().init)
    assert_trees_bits_equal(init(KEYS[0]), init(KEYS[0]))
    assert not np.array_equal(jax.tree.leaves(init(KEYS[0]))[0], jax.tree.leaves(init(KEYS[1]))[0])


def test_a_raw_key_gives_the_bits_of_the_typed_one() -> None:
    params, loss = nnx_model().init(jax.random.key(0)), jax.jit(nnx_model().loss)
    assert_bits_equal(loss(params, BATCH, jax.random.PRNGKey(3))[0], loss(params, BATCH, jax.random.key(3))[0])


class TwoMasks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones(64))
        self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.causal = jnp.tri(2)  # an array that is no variable

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.causal @ jnp.stack([self.first(self.scale[...]), self.second(self.scale[...])])


def test_each_dropout_draws_a_mask_of_its_own_from_the_step_s_key() -> None:
    seen = []

    def loss(module: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        seen.append(key)
        masks = jnp.stack([module.first(jnp.ones(64)), module.second(jnp.ones(64))])
        return masks.sum(), masks

    model = jaxdp.models.from_nnx(TwoMasks, name="masks", loss=loss)
    _, masks = model.loss(model.init(KEYS[0]), BATCH, KEYS[0])
    assert masks.shape == (2, 64)
    assert not np.array_equal(masks[0], masks[1])
    assert seen == [KEYS[0]]
    assert_bits_equal(model.loss(model.init(KEYS[0]), BATCH, None)[1], np.ones((2, 64), np.float32))


def test_an_array_that_is_no_variable_is_a_constant_of_the_nnx_model() -> None:
    model = jaxdp.models.from_nnx(TwoMasks, name="masks")
    params = model.init(jax.random.key(0))
    assert leaf_names(params) == ("scale",)
    assert model.logits is not None
    assert_bits_equal(jax.jit(model.logits)(params, INPUTS), np.array([[1.0] * 64, [2.0] * 64], np.float32))


def test_a_custom_linen_loss_gets_module_params_batch_and_key() -> None:
    def loss(module: Any, params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        out = module.apply({"params": params}, batch["inputs"], train=True, rngs={"dropout": key})
        return jnp.sum(out.astype(jnp.bfloat16)), 6

    model = jaxdp.models.from_linen(LinenLanguageModel(), name="own", example_inputs=INPUTS, loss=loss)
    loss_sum, weight = jax.jit(model.loss)(model.init(jax.random.key(0)), BATCH, KEYS[0])
    assert (loss_sum.dtype, weight.dtype, float(weight)) == (jnp.float32, jnp.float32, 6.0)


class NnxBatchNorm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, rngs=rngs)


class LinenBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return nn.BatchNorm(use_running_average=False, name="norm")(nn.Embed(5, 4)(inputs))


def test_state_that_would_differ_between_ranks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"only parameters and random streams.*norm/mean \(BatchStat\)"):
        jaxdp.models.from_nnx(NnxBatchNorm, name="norm")
    with pytest.raises(ConfigError, match=r"only parameters and random streams.*batch_stats/norm/mean"):
        jaxdp.models.from_linen(LinenBatchNorm(), name="norm", context=3)


def test_a_linen_module_needs_example_inputs_or_a_context() -> None:
    with pytest.raises(ConfigError, match=r"context .* when example_inputs is not given"):
        jaxdp.models.from_linen(LinenLanguageModel(), name="linen")
