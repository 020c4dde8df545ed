"""The token cross-entropy, without a gather: its gradient holds no scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

IGNORED_TARGET = -1


def token_cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums `logsumexp(logits) - logits[target]` over the targets that count.

    `logits` is float[..., V] (used as float32), `targets` int[...] with ids in [0, V), or -1 where
    nothing is to be predicted. Returns `(loss_sum, weight)`, float32 scalars; `weight` is the
    number of targets other than -1, exact below 2^24. The label's logit is picked by comparison
    with an iota, which XLA fuses into the reduction; a gather's gradient would be a scatter-add.
    """
    logits = logits.astype(jnp.float32)
    vocabulary = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    label_logits = jnp.sum(jnp.where(targets[..., None] == vocabulary, logits, 0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - label_logits
    counted = targets != IGNORED_TARGET
    weight = jnp.sum(counted, dtype=jnp.int32).astype(jnp.float32)
    return jnp.sum(jnp.where(counted, losses, 0)), weight
