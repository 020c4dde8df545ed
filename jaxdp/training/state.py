"""What a training step reads and writes, and its named tensors for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.errors import CheckpointError, ConfigError
from jaxdp.leaves import leaf_names, leaf_specs
from jaxdp.models.model import Model
from jaxdp.training.optimizer import Optimizer


class TrainState(NamedTuple):
    """Parameters (float32 masters), optax state, and the number of updates done (int32)."""

    parameters: Any
    optimizer: Any
    updates: Any


def initial_state(model: Model, optimizer: Optimizer, seed: int, device: jax.Device) -> tuple[TrainState, Any]:
    """The state before the first step, on one device, and the dtype that each leaf computes in.

    Leaves that the model holds in float16 or bfloat16 get a float32 master: an update smaller than
    half a unit in the last place would otherwise be lost for ever. Raises `ConfigError` naming a
    leaf that is not a float of at most 32 bits.
    """
    with jax.default_device(device):
        held = jax.jit(model.init)(jax.random.key(seed))
        for leaf in leaf_specs(held):
            if leaf.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
                raise ConfigError(f"parameter {leaf.name!r}", str(leaf.dtype), "float32, float16 or bfloat16")
        parameters = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), held)
        state = TrainState(parameters, jax.jit(optimizer.transformation.init)(parameters), jnp.int32(0))
    return jax.device_get(state), jax.tree.map(lambda leaf: leaf.dtype, held)


def forward_parameters(parameters: Any, dtypes: Any) -> Any:
    """The parameters as the model holds them."""
    return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), parameters, dtypes)


def state_tensors(state: TrainState) -> dict[str, np.ndarray]:
    """Host copies by name: `parameters/...`, `optimizer/...`, `updates`."""
    return {name: np.asarray(leaf) for name, leaf in _named_leaves(state).items()}


def _named_leaves(state: TrainState) -> dict[str, Any]:
    leaves = dict(zip(map("parameters/{}".format, leaf_names(state.parameters)),
                      jax.tree.leaves(state.parameters), strict=True))
    leaves |= zip(map("optimizer/{}".format, leaf_names(state.optimizer)),
                  jax.tree.leaves(state.optimizer), strict=True)
    return leaves | {"updates": state.updates}


def state_from_tensors(tensors: Mapping[str, np.ndarray], like: TrainState) -> TrainState:
    """The state that holds `tensors`, restored by name.

    Raises `CheckpointError` naming the first tensor that is missing, unknown, or of another shape
    or dtype than `like` has.
    """
    expected = _named_leaves(like)
    for name in sorted(expected.keys() ^ tensors.keys()):
        fault = "lacks" if name in expected else "has the unknown"
        raise CheckpointError(f"the checkpoint {fault} tensor {name!r}; it was written by another model or optimizer.")
    for name, leaf in expected.items():
        got = tensors[name]
        if got.shape != leaf.shape or got.dtype != leaf.dtype:
            raise CheckpointError(f"tensor {name!r} of the checkpoint is {got.dtype}{list(got.shape)}, "
                                  f"the model needs {leaf.dtype}{list(leaf.shape)}.")

    def filled(prefix: str, tree: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), [tensors[prefix + name] for name in leaf_names(tree)])

    return TrainState(filled("parameters/", like.parameters), filled("optimizer/", like.optimizer), tensors["updates"])
