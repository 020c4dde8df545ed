"""The arithmetic of one step, in parts that both step modes are made of. All functions are traced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.buckets import BucketPlan
from jaxdp.digest import leaf_fingerprints
from jaxdp.models.model import Batch, Model
from jaxdp.training.optimizer import Optimizer
from jaxdp.training.reduce import divide
from jaxdp.training.state import TrainState, forward_parameters


@dataclasses.dataclass(frozen=True)
class StepRules:
    """What the arithmetic of a step depends on, and nothing about the world."""

    model: Model
    optimizer: Optimizer
    plan: BucketPlan
    forward_dtypes: Any
    key_data: Any  # uint32 data of the run's PRNG key
    accumulation_steps: int
    maximum_gradient_norm: float | None


def part_key(rules: StepRules, step: jax.Array, part: jax.Array, microbatch: jax.Array) -> jax.Array:
    """The PRNG key of one microbatch: a function of seed, step, part (shard or rank) and microbatch."""
    key = jax.random.wrap_key_data(rules.key_data)
    for value in (step, part, microbatch):
        key = jax.random.fold_in(key, value)
    return key


def loss_sum(rules: StepRules, parameters: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`(loss_sum, weight)` of one batch, float32 scalars; `key` None: without dropout."""
    total, weight = rules.model.loss(forward_parameters(parameters, rules.forward_dtypes), batch, key)
    return jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32)


def microbatch_gradients(rules: StepRules, parameters: Any, batch: Batch, step: jax.Array, part: jax.Array,
                         microbatch: jax.Array) -> tuple[jax.Array, Any]:
    """`float32[2]` (loss_sum, weight), and the gradients of loss_sum."""
    key = part_key(rules, step, part, microbatch)
    (total, weight), grads = jax.value_and_grad(lambda p: loss_sum(rules, p, batch, key), has_aux=True)(parameters)
    return jnp.stack([total, weight]), grads


def split_microbatches(batch: Batch, count: int) -> Any:
    """`(B, ...)` leaves as `(count, B / count, ...)`."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), dict(batch))


def accumulated_gradients(rules: StepRules, parameters: Any, batch: Batch, step: jax.Array,
                          part: jax.Array) -> tuple[jax.Array, Any]:
    """As `microbatch_gradients` over a whole batch: microbatches are added in their order."""
    count = rules.accumulation_steps
    if count == 1:
        return microbatch_gradients(rules, parameters, batch, step, part, jnp.int32(0))

    def add(carry: Any, microbatch: Any) -> tuple[Any, None]:
        index, inputs = microbatch
        result = microbatch_gradients(rules, parameters, inputs, step, part, index)
        return jax.tree.map(jnp.add, carry, result), None

    zeros = (jnp.zeros(2, jnp.float32), jax.tree.map(jnp.zeros_like, parameters))
    return jax.lax.scan(add, zeros, (jnp.arange(count), split_microbatches(batch, count)))[0]


def update(rules: StepRules, state: TrainState, sums: Any,
           weight: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    """Divides the summed gradients once by the summed weight and applies the optimizer.

    If a mean gradient is not finite the state comes back unchanged, bit by bit. The report holds
    `finite`, `gradient_norm` (before clipping), `learning_rate` and `gradient_fingerprints`.
    """
    mean = divide(sums, rules.plan, weight)
    # Computed once, in memory: the digest is of the very bits that the optimizer reads.
    mean = jax.lax.optimization_barrier(mean)
    finite = jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(mean)]).all()
    norm = optax.tree.norm(mean)
    clipped = mean if rules.maximum_gradient_norm is None else _clip(mean, norm, rules.maximum_gradient_norm)
    changes, optimizer_state = rules.optimizer.transformation.update(clipped, state.optimizer, state.parameters)
    changed = TrainState(optax.apply_updates(state.parameters, changes), optimizer_state, state.updates + 1)
    report = {"finite": finite, "gradient_norm": norm, "learning_rate": rules.optimizer.learning_rate(state.updates),
              "gradient_fingerprints": leaf_fingerprints(mean)}
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, state), report


def _clip(grads: Any, norm: jax.Array, maximum: float) -> Any:
    scale = jnp.where(norm > maximum, maximum / norm, 1.0)
    return jax.tree.map(lambda leaf: leaf * scale, grads)
