"""The decoder against a plain NumPy one, its bits, and what its compiled gradient may not hold."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_trees_bits_equal

from jaxdp import models
from jaxdp.errors import ConfigError
from jaxdp.models.embedding import embed, one_hot_row_sums, sorted_row_sums
from jaxdp.models.losses import token_cross_entropy

INPUTS = np.array([[1, 7, 1, 3], [0, 1, 1, 5]], np.int32)
TARGETS = np.array([[7, 1, 3, -1], [1, 1, 5, 2]], np.int32)
BATCH = {"inputs": INPUTS, "targets": TARGETS}
EMBEDDING_FORMS = (one_hot_row_sums, sorted_row_sums)


@functools.cache
def parameters(**overrides: Any) -> Any:
    """Tiny's parameters, spread wide enough for every part to matter."""
    params = jax.tree.map(np.asarray, jax.jit(models.get("tiny", **overrides).init)(jax.random.key(0)))
    spread = [leaf * 10 if leaf.ndim == 2 else leaf + np.linspace(0, 1, leaf.size) for leaf in jax.tree.leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), [leaf.astype(np.float32) for leaf in spread])


@functools.cache
def lowered_gradient(**overrides: Any) -> Any:
    """The step's forward and backward as handed to XLA: `((loss_sum, weight), gradient)`."""
    loss = models.get("tiny", **overrides).loss
    return jax.jit(jax.value_and_grad(lambda params, batch: loss(params, batch, None), has_aux=True)).lower(
        parameters(), BATCH)


@functools.cache
def compiled_gradient(**overrides: Any) -> Any:
    return lowered_gradient(**overrides).compile()


def products(**overrides: Any) -> list[str]:
    """The lines of the matrix products of `lowered_gradient`."""
    lines = [line for line in lowered_gradient(**overrides).as_text().splitlines() if "stablehlo.dot_general" in line]
    assert len(lines) > 20
    return lines


def numpy_logits(params: Any, inputs: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """The decoder in float64, written for reading: one sequence and one head at a time."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale

    def rotate(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None] * 10000.0 ** (-2 * np.arange(half) / x.shape[-1])
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        scores = np.where(np.tri(len(q), dtype=bool), rotate(q) @ rotate(k).T / np.sqrt(q.shape[-1]), -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True) @ v

    def layer(x: np.ndarray, p: Any) -> np.ndarray:
        normed = norm(x, p["attention_norm"])
        parts = (("q", heads), ("k", kv_heads), ("v", kv_heads))
        q, k, v = (np.split(normed @ p[name], count, axis=-1) for name, count in parts)
        group = heads // kv_heads
        x = x + np.concatenate([attend(q[h], k[h // group], v[h // group]) for h in range(heads)], axis=-1) @ p["o"]
        normed = norm(x, p["ffn_norm"])
        gate = normed @ p["gate"]
        return x + (gate / (1 + np.exp(-gate)) * (normed @ p["up"])) @ p["down"]

    def sequence(ids: np.ndarray) -> np.ndarray:
        x = params["token_embedding"][ids]
        for p in params["layers"].values():
            x = layer(x, p)
        return norm(x, params["final_norm"]) @ params["output_head"]

    return np.stack([sequence(ids) for ids in inputs])


@pytest.mark.parametrize("shape", [
    {}, {"layers": 2, "dim": 16, "heads": 4, "kv_heads": 2}], ids=["one key head", "two key heads, two layers"])
def test_logits_agree_with_a_plain_numpy_decoder(shape: dict[str, int]) -> None:
    model, params = models.get("tiny", **shape), parameters(**shape)
    assert model.logits is not None
    actual = jax.jit(model.logits)(params, INPUTS)
    assert actual.dtype == jnp.float32
    config = model.config
    np.testing.assert_allclose(actual, numpy_logits(params, INPUTS, config["heads"], config["kv_heads"]),
                               rtol=2e-5, atol=2e-5)


def test_the_loss_is_the_summed_cross_entropy_of_the_targets_that_count() -> None:
    params = parameters()
    logits = numpy_logits(params, INPUTS, 2, 1)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(TARGETS, 0)[..., None], -1)[..., 0]
    (loss_sum, weight), _ = compiled_gradient()(params, BATCH)
    assert (loss_sum.dtype, weight.dtype, loss_sum.shape) == (jnp.float32, jnp.float32, ())
    assert float(weight) == 7.0
    np.testing.assert_allclose(float(loss_sum), losses[TARGETS != -1].sum(), rtol=2e-6)


def test_the_loss_gradient_is_softmax_minus_one_hot_and_zero_where_the_target_is_ignored() -> None:
    logits = np.random.default_rng(1).standard_normal((2, 3, 8)).astype(np.float32) * 4
    targets = np.array([[1, -1, 2], [-1, -1, -1]])
    both = jax.jit(jax.value_and_grad(token_cross_entropy, has_aux=True))
    (_, weight), slope = both(logits, targets)
    assert float(weight) == 2.0
    softmax_minus_one_hot = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) - np.eye(8)[targets]
    np.testing.assert_allclose(slope, np.where(targets[..., None] == -1, 0, softmax_minus_one_hot), atol=1e-6)


def test_a_later_token_does_not_change_an_earlier_logit() -> None:
    model = models.get("tiny")
    assert model.logits is not None
    logits, changed = jax.jit(model.logits), INPUTS + np.array([0, 0, 0, 1], np.int32)
    before, after = logits(parameters(), INPUTS), logits(parameters(), changed)
    assert_bits_equal(before[:, :3], after[:, :3])
    assert not np.array_equal(before[:, 3], after[:, 3])


def test_a_sequence_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="at most the model's 4 tokens; got 5"):
        models.get("tiny").loss(parameters(), {"inputs": np.zeros((1, 5), np.int32),
                                               "targets": np.zeros((1, 5), np.int32)}, None)


# The embedding.

@pytest.mark.parametrize("form", EMBEDDING_FORMS)
def test_row_sums_add_the_rows_of_each_id(form: Any) -> None:
    ids = np.array([3, 0, 3, 6, 3, 0, 6, 6, 6, 1, 1], np.int32)
    rows = np.random.default_rng(0).integers(-64, 65, (len(ids), 5)).astype(np.float32)
    expected = np.zeros((9, 5), np.float32)
    np.add.at(expected, ids, rows)
    assert_bits_equal(np.asarray(jax.jit(form, static_argnums=2)(ids, rows, 9)) + 0.0, expected)


@pytest.mark.parametrize("form", EMBEDDING_FORMS)
def test_row_sums_hold_float32_rows_whole_and_keep_ids_apart(form: Any) -> None:
    rows = np.array([[2.0**100], [1 + 2.0**-23], [-(2.0**100)], [3.0]], np.float32)
    sums = jax.jit(form, static_argnums=2)(np.array([0, 1, 0, 2]), rows, 3)
    assert_bits_equal(np.asarray(sums) + 0.0, np.array([[0.0], [1 + 2.0**-23], [3.0]], np.float32))


@pytest.mark.parametrize("limit", [8, 0], ids=["one-hot", "sorted"])
def test_the_embedding_copies_rows_and_its_gradient_is_that_of_a_lookup(limit: int) -> None:
    table, weights = np.split(np.random.default_rng(3).standard_normal((16, 4)).astype(np.float32), 2)
    lookup = jax.jit(functools.partial(embed, dtype=jnp.float32, one_hot_vocab_limit=limit))
    assert_bits_equal(lookup(table, INPUTS), table[INPUTS])
    expected = np.zeros_like(table)
    np.add.at(expected, INPUTS.reshape(-1), weights)
    actual = jax.jit(jax.grad(lambda t: jnp.sum(lookup(t, INPUTS) * weights.reshape(2, 4, 4))))(table)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_loud(bad: int) -> None:
    rows = embed(jnp.ones((8, 4)), jnp.array([0, bad]), dtype=jnp.float32, one_hot_vocab_limit=8)
    assert_bits_equal(np.isnan(rows), np.array([[False] * 4, [True] * 4]))


# What the compiled gradient holds.

def scatters(text: str) -> int:
    return len(re.findall(r"\bscatter\(|stablehlo\.scatter\b|select_and_scatter", text))


@pytest.mark.parametrize("limit", [8, 0], ids=["one-hot", "sorted"])
def test_the_compiled_gradient_holds_no_scatter(limit: int) -> None:
    overrides = {} if limit else {"one_hot_vocab_limit": 0}
    # The CPU compiler expands scatters into loops: there it is the text handed to it that tells.
    assert scatters(lowered_gradient(**overrides).as_text()) == 0
    assert scatters(compiled_gradient(**overrides).as_text()) == 0
    assert scatters(lowered_gradient(**overrides, compute_dtype="bfloat16").as_text()) == 0


def test_the_reader_of_scatters_sees_those_of_a_plain_lookup_and_a_plain_label_gather() -> None:
    lookup = jax.jit(jax.grad(lambda table: table[INPUTS].sum()))
    labels = jax.jit(jax.grad(lambda logits: jnp.take_along_axis(logits, INPUTS[:, :1], 1).sum()))
    assert scatters(lookup.lower(np.ones((8, 4), np.float32)).as_text()) > 0
    assert scatters(labels.lower(np.ones((2, 8), np.float32)).as_text()) > 0
    assert scatters("%s = f32[8,4]{1,0} scatter(%a, %b, %c), to_apply=%add") == 1  # as XLA writes it


def test_every_float32_product_of_the_gradient_asks_for_highest_precision() -> None:
    assert not [line for line in products() if "precision = [HIGHEST, HIGHEST]" not in line]


def test_a_precision_that_the_user_set_is_left_in_force() -> None:
    with jax.default_matmul_precision("tensorfloat32"):
        assert not [line for line in products(one_hot_vocab_limit=1) if "HIGHEST" in line]


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.03)])
def test_narrow_compute_keeps_gradients_and_loss_in_float32_and_near_the_exact_ones(
        dtype: str, tolerance: float) -> None:
    (loss_sum, _), slopes = compiled_gradient(compute_dtype=dtype)(parameters(), BATCH)
    (exact_sum, _), exact_slopes = compiled_gradient()(parameters(), BATCH)
    np.testing.assert_allclose(loss_sum, exact_sum, rtol=tolerance / 8)
    assert loss_sum.dtype == jnp.float32
    for actual, exact in zip(jax.tree.leaves(slopes), jax.tree.leaves(exact_slopes), strict=True):
        assert actual.dtype == jnp.float32
        assert np.linalg.norm(actual - exact) < tolerance * np.linalg.norm(exact)


def test_narrow_compute_multiplies_nothing_in_float32() -> None:
    def is_narrow(line: str) -> bool:
        operands = re.search(r": \((tensor<[^>]*>), (tensor<[^>]*>)\)", line)
        return "rhs_precision_type = bf16" in line or (operands is not None and "f32" not in operands.group(0))

    assert not [line for line in products(compute_dtype="bfloat16") if not is_narrow(line)]


def test_a_weight_s_gradient_leaves_a_narrow_product_unrounded() -> None:
    # The text, not the numbers: on CPU the compiler drops a rounding to bfloat16 and back.
    over_rows = [line for line in products(compute_dtype="bfloat16") if "contracting_dims = [0] x [0]" in line]
    assert len(over_rows) == 9  # q, k, v, o, gate, up, down, the head and the one-hot embedding
    assert not [line for line in over_rows if not re.search(r"-> tensor<\d+x\d+xf32>", line)]


# Dropout.

def test_dropout_follows_the_key_and_is_off_without_one() -> None:
    loss = jax.jit(models.get("tiny", dropout=0.5).loss)
    keys = jax.random.split(jax.random.key(7), 2)
    first, again, other = (loss(parameters(), BATCH, key)[0] for key in (keys[0], keys[0], keys[1]))
    assert_bits_equal(first, again)
    assert float(first) != float(other)
    (plain, _), _ = compiled_gradient()(parameters(), BATCH)
    np.testing.assert_allclose(loss(parameters(), BATCH, None)[0], plain, rtol=1e-6)


def test_initialisation_repeats_for_a_key_and_differs_between_keys_and_tensors() -> None:
    init = jax.jit(models.get("tiny").init)
    first, again, other = (init(jax.random.key(seed)) for seed in (3, 3, 4))
    assert_trees_bits_equal(first, again)
    assert not np.array_equal(first["output_head"], other["output_head"])
    assert not np.array_equal(first["output_head"], first["token_embedding"])


def test_initialisation_has_the_same_bits_inside_and_outside_a_jit() -> None:
    init = models.get("tiny", dim=16, layers=2).init
    assert_trees_bits_equal(jax.jit(init)(jax.random.key(5)), init(jax.random.key(5)))


def test_initial_spread_is_that_of_the_named_source() -> None:
    params = jax.jit(models.get("tiny", dim=64, layers=2, ffn_dim=256, vocab_size=512).init)(jax.random.key(0))
    layer = params["layers"][1]
    for leaf, stddev in ((params["token_embedding"], 0.02), (layer["q"], 0.02), (layer["gate"], 0.02),
                         (layer["o"], 0.01), (layer["down"], 0.01), (params["output_head"], 0.02)):
        np.testing.assert_allclose(np.std(leaf), stddev, rtol=0.05)
    assert_bits_equal(layer["attention_norm"], np.ones(64, np.float32))
