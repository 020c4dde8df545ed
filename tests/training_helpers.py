"""What the tests of the trainer share: small models, batches with known gradients, recorded runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import assert_bits_equal

import jaxdp

TINY_ADAMW = jaxdp.AdamWConfig(learning_rate=5e-3, beta1=0.9, beta2=0.99, epsilon=1e-8)
TINY_SGD = optax.sgd(0.1)


def config(world: int, **fields: Any) -> jaxdp.DataParallelConfig:
    """The configuration of the first `world` devices."""
    return jaxdp.DataParallelConfig(device_indices=tuple(range(world)), **fields)


def batch_of(rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """A batch of these token ids; where an id is -1 the input is 0 and nothing is to be predicted."""
    ids = np.array(rows, np.int32)
    return {"inputs": np.maximum(ids, 0), "targets": ids}


def tiny_batch(rank: int, step: int, rows: int = 2) -> dict[str, np.ndarray]:
    """token = (97 rank + 13 i + 7) mod 8 and target = token + 1 mod 8, another stretch of i each step."""
    i = np.arange(rows * 4).reshape(rows, 4) + 7 * step
    tokens = (97 * rank + 13 * i + 7) % 8
    return {"inputs": tokens.astype(np.int32), "targets": ((tokens + 1) % 8).astype(np.int32)}


def ragged_batch(part: int, step: int, rows: int = 2) -> dict[str, np.ndarray]:
    """As `tiny_batch`, with another number of ignored targets for each part."""
    batch = tiny_batch(part, step, rows)
    batch["targets"].reshape(-1)[:(3 * part + step) % 5] = -1
    return batch


def linear_model(gradients: Mapping[str, Sequence[float]], *, initial: float = 1.0,
                 dtypes: Mapping[str, Any] | None = None) -> jaxdp.Model:
    """Scalars, each `initial`: a counted position with input t adds `gradients[name][t] * params[name]`.

    So a batch's gradient for `name` is the sum of `gradients[name][t]` over its counted positions. A
    scalar with no other gradient than 0 takes no part in the loss.
    """
    tables = {name: np.asarray(values, np.float32) for name, values in gradients.items()}

    def init(key: Any) -> Any:
        del key
        return {name: jnp.asarray(initial, (dtypes or {}).get(name, jnp.float32)) for name in tables}

    def loss(params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        del key
        counted = batch["targets"] != -1
        total = jnp.float32(0)
        for name, table in ((name, table) for name, table in tables.items() if table.any()):
            coefficient = jnp.sum(jnp.where(counted, jnp.asarray(table)[batch["inputs"]], 0))
            total += coefficient * params[name].astype(jnp.float32)
        return total, jnp.sum(counted).astype(jnp.float32)

    return jaxdp.Model(name="linear", init=init, loss=loss, vocab_size=len(next(iter(tables.values()))))


def perceptron(dropout: float = 0.0) -> jaxdp.Model:
    """A small network over 8 tokens with leaves embedding, head, hidden, and `spare`, which the loss ignores."""
    shapes = {"embedding": (8, 6), "hidden": (6, 6), "head": (6, 8), "spare": (3,)}

    def init(key: Any) -> Any:
        del key
        generator = np.random.default_rng(0)
        return {name: jnp.asarray(generator.standard_normal(shape), jnp.float32) / 2 for name, shape in shapes.items()}

    def loss(params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        x = jnp.tanh(jax.nn.one_hot(batch["inputs"], 8) @ params["embedding"] @ params["hidden"])
        if key is not None and dropout:
            x = jnp.where(jax.random.bernoulli(key, 1 - dropout, x.shape), x / (1 - dropout), 0)
        logits = jax.nn.log_softmax(x @ params["head"])
        counted = batch["targets"] != -1
        losses = -jnp.sum(logits * jax.nn.one_hot(batch["targets"], 8), axis=-1)
        return jnp.sum(jnp.where(counted, losses, 0)), jnp.sum(counted).astype(jnp.float32)

    return jaxdp.Model(name="perceptron", init=init, loss=loss, vocab_size=8)


def rank_parameters(trainer: jaxdp.DataParallelTrainer) -> list[Any]:
    """Each rank's parameters as host arrays."""
    return [jax.tree.map(lambda leaf: np.asarray(leaf)[0], row.parameters) for row in trainer._step.rows]


def saved_state(trainer: jaxdp.DataParallelTrainer) -> dict[str, np.ndarray]:
    """A copy of the state that no later step can reach."""
    return {name: x.copy() for name, x in trainer.state_tensors().items()}


def assert_state(trainer: jaxdp.DataParallelTrainer, expected: Mapping[str, np.ndarray]) -> None:
    """Fails unless the trainer's state has these names and bits."""
    actual = trainer.state_tensors()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bits_equal(actual[name], tensor, name)


def collective_calls(trainer: jaxdp.DataParallelTrainer) -> list[int]:
    """How many collectives each rank has issued."""
    assert trainer._collective is not None
    return [trainer._collective.calls(rank) for rank in range(trainer.world_size)]


@dataclasses.dataclass(frozen=True)
class Record:
    """One run of `tiny`: what it started from, what each step gave, and what was compiled."""

    initial: Any
    metrics: tuple[jaxdp.StepMetrics, ...]
    parameters: tuple[tuple[Any, ...], ...]  # [step][rank]
    compiled_text: str
    digest: str
    plan: jaxdp.BucketPlan


def tiny_run(step_mode: str = "fused", reducer: str = "tree", optimizer: str = "adamw", *, bucket_bytes: int = 25 << 20,
             repeat: int = 0) -> Record:
    """Three steps of `tiny` on two ranks; computed once for each set of arguments, and again for each `repeat`."""
    return _tiny_run(step_mode, reducer, optimizer, bucket_bytes, repeat)


@functools.cache
def _tiny_run(step_mode: str, reducer: str, optimizer: str, bucket_bytes: int, repeat: int) -> Record:
    del repeat
    chosen = {"adamw": TINY_ADAMW, "sgd": TINY_SGD}[optimizer]
    settings = config(2, step_mode=step_mode, reducer=reducer, maximum_bucket_bytes=bucket_bytes, optimizer=chosen)
    with jaxdp.DataParallelTrainer(jaxdp.models.get("tiny"), seed=0, config=settings) as trainer:
        initial = trainer.parameters()
        metrics, parameters = [], []
        for step in (1, 2, 3):
            metrics.append(trainer.step([tiny_batch(rank, step) for rank in range(2)], step))
            parameters.append(tuple(rank_parameters(trainer)))
        (text,) = trainer.compiled_text()
        return Record(initial, tuple(metrics), tuple(parameters), text, trainer.parameter_digest(), trainer.plan)
