"""An embedding lookup whose gradient adds colliding rows in an order that never changes.

The gradient of a plain lookup is a scatter-add: on a GPU rows of one id meet in any order, and the
bits differ from run to run. Here it is one of two forms without a scatter.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def embed(table: jax.Array, ids: jax.Array, *, dtype: DTypeLike, one_hot_vocab_limit: int) -> jax.Array:
    """Rows `ids` of `table` as `dtype`: float32 `[V, D]`, int `[...]` to `[..., D]`.

    An id outside [0, V) gives a row of NaN, so that it cannot pass unseen. The gradient is float32:
    up to `one_hot_vocab_limit` rows `one_hot(ids).T @ gradient`, above it a sorted segment sum.
    """
    return _embed(table.shape[0], one_hot_vocab_limit, jnp.dtype(dtype), table, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _embed(vocab_size: int, one_hot_vocab_limit: int, dtype: jnp.dtype, table: jax.Array, ids: jax.Array) -> jax.Array:
    ids = jnp.where(ids < 0, vocab_size, ids)  # a negative index would count from the end
    return table.at[ids].get(mode="fill", fill_value=jnp.nan).astype(dtype)


def _embed_forward(vocab_size: int, one_hot_vocab_limit: int, dtype: jnp.dtype, table: jax.Array,
                   ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _embed(vocab_size, one_hot_vocab_limit, dtype, table, ids), ids


def _embed_backward(vocab_size: int, one_hot_vocab_limit: int, dtype: jnp.dtype, ids: jax.Array,
                    gradient: jax.Array) -> tuple[jax.Array, None]:
    form = one_hot_row_sums if vocab_size <= one_hot_vocab_limit else sorted_row_sums
    return form(ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1]), vocab_size), None


_embed.defvjp(_embed_forward, _embed_backward)


def one_hot_row_sums(ids: jax.Array, rows: jax.Array, vocab_size: int) -> jax.Array:
    """Sums `rows` by id with one matrix product: int `[N]`, float `[N, D]` to float32 `[V, D]`.

    Costs 2*N*V*D operations. HIGHEST precision keeps float32 rows whole; products with 1 are exact.
    """
    one_hot = jax.nn.one_hot(ids, vocab_size, dtype=rows.dtype)
    return jnp.einsum("nv,nd->vd", one_hot, rows, precision=jax.lax.Precision.HIGHEST,
                      preferred_element_type=jnp.float32)


def sorted_row_sums(ids: jax.Array, rows: jax.Array, vocab_size: int) -> jax.Array:
    """Sums `rows` by id after a stable sort: int `[N]`, float `[N, D]` to float32 `[V, D]`.

    Equal ids become neighbours; a segmented scan leaves each id's sum at its last place, from where
    it is gathered. Sums only ever hold rows of their own id, in an order fixed by the ids alone.
    """
    order = jnp.argsort(ids, stable=True)
    sorted_ids = ids[order]
    _, sums = jax.lax.associative_scan(_add_within_segment, (sorted_ids, rows[order].astype(jnp.float32)))
    vocabulary = jnp.arange(vocab_size, dtype=ids.dtype)
    last = jnp.maximum(jnp.searchsorted(sorted_ids, vocabulary, side="right") - 1, 0)
    return jnp.where((sorted_ids[last] == vocabulary)[:, None], sums[last], 0)


def _add_within_segment(left: tuple[jax.Array, jax.Array],
                        right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Joins two neighbouring stretches, each known by its last id and the sum of that id's rows.

    Associative on sorted ids: where the outer two ids are equal, so is every id between them.
    """
    (left_ids, left_sums), (right_ids, right_sums) = left, right
    same = (left_ids == right_ids)[:, None]
    return right_ids, right_sums + jnp.where(same, left_sums, 0)
