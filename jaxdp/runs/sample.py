"""Text from a byte-level model."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp import leaves, models
from jaxdp.errors import CheckpointError, ConfigError
from jaxdp.models import Model
from jaxdp.runs.checkpoint import PARAMETER_PREFIX, State

BYTES = 256


def can_sample(model: Model) -> bool:
    """Whether the model's tokens are bytes and it gives logits."""
    return model.logits is not None and model.vocab_size == BYTES


def generate(model: Model, params: Any, *, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    """`length` bytes that go on from `prompt` (a newline where it is empty), the same for the same arguments.

    `temperature` 0 takes the likeliest byte each time. The model sees at most its context.
    """
    import jax

    assert model.logits is not None, "ask can_sample first"
    context = model.context or BYTES
    logits_of = jax.jit(model.logits)
    generator = np.random.default_rng(seed)
    text = bytearray(prompt or b"\n")
    for _ in range(length):
        window = np.zeros((1, context), np.int32)
        seen = text[-context:]
        window[0, :len(seen)] = np.frombuffer(bytes(seen), np.uint8)
        logits = np.asarray(logits_of(params, window)[0, len(seen) - 1], np.float64)
        text.append(_choose(logits, temperature, generator))
    return bytes(text[len(prompt or b"\n"):])


def load_model(state: State) -> tuple[Model, Any]:
    """The model that a checkpoint was trained with and its parameters, put in place by name.

    Raises `ConfigError` when the model is no longer known, `CheckpointError` when it has changed.
    """
    import jax

    described = dict(state.identity["model"])
    model = models.get(described.pop("name"))
    template = jax.eval_shape(model.init, jax.random.key(0))
    specs = leaves.leaf_specs(template)
    saved = {name.removeprefix(PARAMETER_PREFIX): tensor for name, tensor in state.tensors.items()
             if name.startswith(PARAMETER_PREFIX)}
    if {spec.name: spec.shape for spec in specs} != {name: tensor.shape for name, tensor in saved.items()}:
        raise CheckpointError(f"The model {model.name} now has other parameters than the checkpoint of step "
                              f"{state.step}. Use the release and the model that wrote it.")
    structure = jax.tree_util.tree_structure(template)
    return model, jax.tree_util.tree_unflatten(structure, [saved[spec.name] for spec in specs])


def sample(state: State, *, prompt: str, length: int, temperature: float, seed: int) -> str:
    """Text from a checkpoint; bytes that are no UTF-8 show as U+FFFD. Raises `ConfigError` for another model."""
    model, params = load_model(state)
    if not can_sample(model):
        raise ConfigError("model", model.name, f"a byte-level model (vocabulary {BYTES}) with logits, to sample text")
    text = generate(model, params, prompt=prompt.encode("utf-8", "surrogateescape"), length=length,
                    temperature=temperature, seed=seed)
    return text.decode("utf-8", "replace")


def _choose(logits: np.ndarray, temperature: float, generator: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / temperature)
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
