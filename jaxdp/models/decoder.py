"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The output head is not tied to the embedding and nothing has a bias. Canonical parameter order:
token_embedding; per layer attention_norm, q, k, v, o, ffn_norm, gate, up, down; final_norm;
output_head. Matrices are (in, out). Sources: Touvron et al. 2023 (LLaMA) for the layer, Su et al.
2021 for rotary positions, Ainslie et al. 2023 for grouped queries, Shazeer 2020 for SwiGLU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdp.errors import ConfigError
from jaxdp.models.adapters import from_nnx
from jaxdp.models.embedding import embed
from jaxdp.models.linear import linear, matmul_precision
from jaxdp.models.losses import token_cross_entropy
from jaxdp.models.model import Batch, Model
from jaxdp.models.presets import DecoderConfig

NORM_EPSILON = 1e-5  # LLaMA 2
ROTARY_BASE = 10000.0  # Su et al. 2021
INITIAL_STDDEV = 0.02  # Radford et al. 2019 (GPT-2), which also scales o and down by 1/sqrt(2*layers)

Rotation = tuple[jax.Array, jax.Array]  # cosines and sines, float32[T, 1, head_dim / 2]


def decoder_model(config: DecoderConfig, *, name: str) -> Model:
    """The decoder of `config` as a `Model`; its `config` record is `config` as plain values.

    In float32 no product is rounded to tf32, unless the user sets `jax_default_matmul_precision`.
    Raises `ConfigError` when a batch is longer than `config.context`.
    """
    model = from_nnx(lambda rngs: Decoder(config, rngs), name=name, loss=_decoder_loss,
                     vocab_size=config.vocab_size, context=config.context, config=dataclasses.asdict(config))

    def with_compute_dtype(dtype: Any) -> Model:
        return decoder_model(dataclasses.replace(config, compute_dtype=dtype), name=name)

    return dataclasses.replace(model, with_compute_dtype=with_compute_dtype)


class Decoder(nnx.Module):
    """Maps int32[B, T] token ids to float32[B, T, vocab_size] logits."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        draws = _Draws(rngs.params(), config.matrix_elements)
        self.config = config
        self.token_embedding = draws.take((config.vocab_size, config.dim), INITIAL_STDDEV)
        self.layers = nnx.List([DecoderLayer(config, draws, rngs) for _ in range(config.layers)])
        self.final_norm = _ones(config.dim)
        self.output_head = draws.take((config.dim, config.vocab_size), INITIAL_STDDEV)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        config = self.config
        if inputs.shape[-1] > config.context:
            raise ConfigError("context", inputs.shape[-1], f"at most the model's {config.context} tokens")
        x = embed(self.token_embedding[...], inputs, dtype=config.compute_dtype,
                  one_hot_vocab_limit=config.one_hot_vocab_limit)
        x = self.dropout(x)
        rotation = _rotation(inputs.shape[-1], config.head_dim)
        for layer in self.layers:
            x = layer(x, rotation)
        return linear(_rms_norm(x, self.final_norm[...]), self.output_head[...], jnp.float32)


class DecoderLayer(nnx.Module):
    """Attention, then the feed-forward part, each on a normed input and added to the residual."""

    def __init__(self, config: DecoderConfig, draws: _Draws, rngs: nnx.Rngs) -> None:
        dim, kv_dim, ffn_dim = config.dim, config.kv_heads * config.head_dim, config.ffn_dim
        residual_stddev = INITIAL_STDDEV / math.sqrt(2 * config.layers)
        self.head_dim = config.head_dim
        self.attention_norm = _ones(dim)
        self.q = draws.take((dim, dim), INITIAL_STDDEV)
        self.k = draws.take((dim, kv_dim), INITIAL_STDDEV)
        self.v = draws.take((dim, kv_dim), INITIAL_STDDEV)
        self.o = draws.take((dim, dim), residual_stddev)
        self.ffn_norm = _ones(dim)
        self.gate = draws.take((dim, ffn_dim), INITIAL_STDDEV)
        self.up = draws.take((dim, ffn_dim), INITIAL_STDDEV)
        self.down = draws.take((ffn_dim, dim), residual_stddev)
        self.attention_dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.ffn_dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, rotation: Rotation) -> jax.Array:
        x = x + self.attention_dropout(self._attention(_rms_norm(x, self.attention_norm[...]), rotation))
        return x + self.ffn_dropout(self._feed_forward(_rms_norm(x, self.ffn_norm[...])))

    def _attention(self, x: jax.Array, rotation: Rotation) -> jax.Array:
        q, k, v = (linear(x, weight[...]).reshape(*x.shape[:-1], -1, self.head_dim)
                   for weight in (self.q, self.k, self.v))
        mixed = _causal_attention(_rotate(q, rotation), _rotate(k, rotation), v)
        return linear(mixed.reshape(x.shape), self.o[...])

    def _feed_forward(self, x: jax.Array) -> jax.Array:
        return linear(jax.nn.silu(linear(x, self.gate[...])) * linear(x, self.up[...]), self.down[...])


def _decoder_loss(module: Decoder, batch: Batch, key: Any) -> tuple[jax.Array, jax.Array]:
    return token_cross_entropy(module(batch["inputs"]), batch["targets"])


class _Draws:
    """The normal numbers of a whole model from one draw, handed out in order.

    One draw is one program to compile; a draw a tensor would be one a shape. The slice between draw
    and scaling keeps a surrounding `jit` from joining the two products, which would change bits.
    """

    def __init__(self, key: jax.Array, count: int) -> None:
        self._values = jax.random.normal(key, (count,), jnp.float32)
        self._taken = 0

    def take(self, shape: tuple[int, ...], stddev: float) -> nnx.Param[jax.Array]:
        """The next numbers, times `stddev`, as a parameter of `shape`."""
        start, self._taken = self._taken, self._taken + math.prod(shape)
        return nnx.Param(_scaled_part(self._values, start, shape, stddev))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _scaled_part(values: jax.Array, start: int, shape: tuple[int, ...], stddev: float) -> jax.Array:
    return stddev * jax.lax.dynamic_slice(values, (start,), (math.prod(shape),)).reshape(shape)


def _ones(dim: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.ones(dim, jnp.float32))


def _causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention, its softmax in float32: `[B, T, heads, head_dim]` in and out.

    Float16 attends in float32: JAX asks for a float16 product that XLA lacks on CPU.
    """
    dtype = jnp.dtype(jnp.float32) if q.dtype == jnp.float16 else q.dtype
    q, k, v, out_dtype = q.astype(dtype), k.astype(dtype), v.astype(dtype), v.dtype
    with jax.default_matmul_precision(matmul_precision(dtype)):
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    return mixed.astype(out_dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / rms(x) * scale` over the last dim, computed in float32, returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + NORM_EPSILON) * scale).astype(x.dtype)


def _rotation(length: int, head_dim: int) -> Rotation:
    """Cosines and sines of `position * base^(-2i / head_dim)`, pair i.

    Computed by NumPy in float64 and rounded once: constants that do not depend on the backend.
    """
    frequencies = ROTARY_BASE ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(length), frequencies)[:, None, :]
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def _rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Turns the pairs (i, i + head_dim / 2) of `[B, T, heads, head_dim]`, in float32."""
    cosines, sines = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return turned.astype(x.dtype)
