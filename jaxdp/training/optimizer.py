"""The optimizer of a step: optax, with a learning rate that can be reported."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.config import AdamWConfig


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation and, where it is known, the learning rate of each update.

    `schedule(count)` takes the number of updates already done; None: the user's own transformation.
    """

    transformation: optax.GradientTransformation
    schedule: optax.Schedule | None

    def learning_rate(self, updates: Any) -> jax.Array:
        """The rate that update `updates + 1` uses, float32; NaN where it is unknown."""
        return jnp.float32(jnp.nan) if self.schedule is None else jnp.asarray(self.schedule(updates), jnp.float32)


def make_optimizer(config: AdamWConfig | optax.GradientTransformation) -> Optimizer:
    """AdamW as configured, or the user's transformation as it is."""
    if not isinstance(config, AdamWConfig):
        return Optimizer(config, None)
    schedule = _schedule(config)
    adamw = optax.adamw(schedule, b1=config.beta1, b2=config.beta2, eps=config.epsilon,
                        weight_decay=config.weight_decay)
    return Optimizer(adamw, schedule)


def _schedule(config: AdamWConfig) -> optax.Schedule:
    rate = config.learning_rate
    after = optax.constant_schedule(rate)
    if config.decay_steps:
        after = optax.cosine_decay_schedule(rate, config.decay_steps - config.warmup_steps,
                                            alpha=config.minimum_learning_rate / rate)
    if not config.warmup_steps:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, rate, config.warmup_steps), after], [config.warmup_steps])
