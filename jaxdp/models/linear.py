"""The matrix product of a layer: low-precision operands, float32 weight gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_BATCHED = (((1,), (1,)), ((), ()))  # x[n, i] . w[o, i] over i
_OVER_ROWS = (((0,), (0,)), ((), ()))  # x[n, i] . g[n, o] over n


def matmul_precision(dtype: DTypeLike) -> Any:
    """"highest" for float32: no product is rounded to tf32, as JAX lets a GPU do by default.

    A default that the user has set for the process (`jax_default_matmul_precision`) wins; None
    where neither says anything.
    """
    setting = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009 (unknown to type checkers)
    return "highest" if setting is None and jnp.dtype(dtype) == jnp.float32 else setting


def linear(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike | None = None) -> jax.Array:
    """`x @ weight` in the dtype of `x`: `[..., i]`, float32 `[i, o]` to `[..., o]`.

    The result has `out_dtype` (default that of `x`). The incoming gradient is cast to the dtype of
    `x`, so that backward products run as fast as forward ones; the weight's gradient leaves the
    product's accumulator as float32, never rounded to the dtype of `x`.
    """
    rows = x.reshape(-1, x.shape[-1])
    result: jax.Array = _linear(matmul_precision(x.dtype), jnp.dtype(out_dtype or x.dtype), rows, weight)
    return result.reshape(*x.shape[:-1], weight.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(precision: Any, out_dtype: jnp.dtype, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x, weight.astype(x.dtype), precision=precision, preferred_element_type=out_dtype)


def _linear_forward(precision: Any, out_dtype: jnp.dtype, x: jax.Array,
                    weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _linear(precision, out_dtype, x, weight), (x, weight)


def _linear_backward(precision: Any, out_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array],
                     gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    gradient = gradient.astype(x.dtype)
    to_x = jax.lax.dot_general(gradient, weight.astype(x.dtype), _BATCHED, precision=precision,
                               preferred_element_type=x.dtype)
    to_weight = jax.lax.dot_general(x, gradient, _OVER_ROWS, precision=precision,
                                    preferred_element_type=weight.dtype)
    return to_x, to_weight


_linear.defvjp(_linear_forward, _linear_backward)
