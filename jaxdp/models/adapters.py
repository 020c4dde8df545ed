"""A user's flax module as a `Model`: parameters as an ordered pytree, dropout from the step's key.

Canonical parameter order is the order of definition: JAX flattens a plain dict by sorted keys and
an `OrderedDict` as it was filled, so parameters are nested `OrderedDict`s. Keys are attribute names
(text) and places in a list (integers), as flax has them in its paths.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from jaxdp.errors import ConfigError
from jaxdp.models.losses import token_cross_entropy
from jaxdp.models.model import Batch, Model, Params

Path = tuple[Any, ...]
Loss = tuple[Any, Any]  # (loss_sum, weight)
NnxLoss = Callable[[Any, Batch, Any], Loss]  # (module, batch, key)
LinenLoss = Callable[[Any, Params, Batch, Any], Loss]  # (module, params, batch, key)

_STATELESS = "only parameters and random streams (other state would differ between ranks)"


def from_nnx(make_module: Callable[[nnx.Rngs], nnx.Module], *, name: str, loss: NnxLoss | None = None,
             vocab_size: int | None = None, context: int | None = None,
             config: Mapping[str, Any] | None = None) -> Model:
    """A `Model` of the nnx module that `make_module(rngs)` builds.

    The default loss is `token_cross_entropy(module(batch["inputs"]), batch["targets"])`; a custom
    `loss(module, batch, key)` returns `(loss_sum, weight)`, the weight being the number of target
    tokens. With a key the module is in train mode and each of its random streams starts anew from
    the key; without one it is in eval mode. `logits` is `module(inputs)` in eval mode, as float32.
    Every `nnx.Param` is trained. Arrays that are no variables (a mask) are constants, taken once
    from `make_module(nnx.Rngs(0))`. Raises `ConfigError` naming any other variable (`BatchStat`,
    `Cache`, ...). `config` is what a checkpoint records of the model.
    """
    parts = _NnxParts(make_module)

    def apply_loss(params: Params, batch: Batch, key: Any) -> Loss:
        module = parts.merge(params, key)
        if loss is not None:
            return _as_float32(loss(module, batch, key))
        return token_cross_entropy(module(batch["inputs"]), batch["targets"])

    def logits(params: Params, inputs: Any) -> jax.Array:
        return parts.merge(params, None)(inputs).astype(jnp.float32)

    return Model(name=name, init=parts.init, loss=apply_loss, logits=logits, vocab_size=vocab_size,
                 context=context, config=dict(config or {"name": name}))


def from_linen(module: nn.Module, *, name: str, context: int | None = None, example_inputs: Any = None,
               loss: LinenLoss | None = None, vocab_size: int | None = None,
               train_kwargs: Mapping[str, Any] | None = None, eval_kwargs: Mapping[str, Any] | None = None,
               rng_streams: Sequence[str] = ("dropout",), config: Mapping[str, Any] | None = None) -> Model:
    """A `Model` of a linen module.

    The module is initialised with `example_inputs`, by default `int32[1, context]` of zeros; one of
    the two is needed. The default loss is the token cross-entropy of `module.apply({"params":
    params}, batch["inputs"])`; a custom `loss(module, params, batch, key)` returns `(loss_sum,
    weight)`. `train_kwargs` (`{"train": True}`) go to the module when there is a key, `eval_kwargs`
    when there is none and for `init` and `logits`. Each of `rng_streams` gets a key of its own.
    Raises `ConfigError` naming any collection besides "params" (`batch_stats`, `cache`, ...).
    """
    if example_inputs is None and context is None:
        raise ConfigError("context", context, "the number of tokens when example_inputs is not given")
    example = jnp.zeros((1, context), jnp.int32) if example_inputs is None else example_inputs
    create = _linen_create(module, example, rng_streams, dict(eval_kwargs or {}))
    order = _linen_order(create)

    def apply(params: Params, inputs: Any, key: Any) -> Any:
        if key is None:
            return module.apply({"params": params}, inputs, **(eval_kwargs or {}))
        return module.apply({"params": params}, inputs, rngs=_streams(rng_streams, key), **(train_kwargs or {}))

    def init(key: Any) -> Params:
        return _in_order(meta.unbox(create(key)["params"]), order)

    def apply_loss(params: Params, batch: Batch, key: Any) -> Loss:
        if loss is not None:
            return _as_float32(loss(module, params, batch, key))
        return token_cross_entropy(apply(params, batch["inputs"], key), batch["targets"])

    def logits(params: Params, inputs: Any) -> jax.Array:
        return apply(params, inputs, None).astype(jnp.float32)

    return Model(name=name, init=init, loss=apply_loss, logits=logits, vocab_size=vocab_size,
                 context=context, config=dict(config or {"name": name}))


class _NnxParts:
    """An nnx module taken apart: structure, parameter paths in definition order, streams, constants."""

    def __init__(self, make_module: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self._make_module = make_module
        module, order = _template(lambda: make_module(nnx.Rngs(0)))
        self._structure, params, streams, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
        self._constants = dict(nnx.to_flat_state(rest))
        for path, leaf in self._constants.items():
            if isinstance(leaf, nnx.Variable):
                raise ConfigError("module state", f"{_text(path)} ({type(leaf).__name__})", _STATELESS)
        variables = dict(nnx.to_flat_state(jax.eval_shape(lambda: params)))  # shapes: holds no memory
        self._params = OrderedDict((path, variables[path]) for path in order)
        self._streams = OrderedDict(nnx.to_flat_state(streams))

    def init(self, key: Any) -> Params:
        """Fresh parameters: nested `OrderedDict`s of arrays in definition order."""
        values = dict(nnx.to_flat_state(nnx.state(self._make_module(nnx.Rngs(key)), nnx.Param)))
        return _nested((path, values[path][...]) for path in self._params)

    def merge(self, params: Params, key: Any) -> Any:
        """The module holding `params`, in train mode with streams from `key`, or in eval mode."""
        filled = [(path, variable.replace(_leaf(params, path))) for path, variable in self._params.items()]
        module: Any = nnx.merge(self._structure, nnx.from_flat_state([
            *filled, *self._seeded_streams(key), *self._constants.items()]))
        if key is None:
            module.eval()
        else:
            module.train()
        return module

    def _seeded_streams(self, key: Any) -> list[tuple[Path, Any]]:
        base = jax.random.key(0) if key is None else _typed(key)
        return [(path, variable.replace(_stream_state(variable, jax.random.fold_in(base, index))))
                for index, (path, variable) in enumerate(self._streams.items())]


def _stream_state(variable: nnx.Variable[Any], key: jax.Array) -> jax.Array:
    """A stream's fresh state: its key (split where one key a layer is held), or its count, 0."""
    if not isinstance(variable, nnx.RngKey):
        return jnp.zeros(variable.shape, variable.dtype)
    return jax.random.split(key, variable.shape) if variable.shape else key


def _template(build: Callable[[], nnx.Module]) -> tuple[nnx.Module, list[Path]]:
    """The module, and its parameters' paths in definition order.

    The module is abstract, unless it holds plain arrays: under a trace flax takes those for static.
    """
    order: list[Path] = []
    arrays: list[Any] = []

    def inspect() -> None:
        module = build()
        order.extend(_definition_order(module))  # read here: a transformation returns attributes sorted
        arrays.extend(leaf for _, leaf in nnx.iter_graph(module)
                      if isinstance(leaf, (jax.Array, np.ndarray)) and not isinstance(leaf, nnx.Variable))

    jax.eval_shape(inspect)
    return build() if arrays else nnx.eval_shape(build), order


def _definition_order(module: nnx.Module) -> list[Path]:
    """The paths of the module's parameters, sorted by each step's place among its parent's attributes."""

    def places(path: Path) -> list[int]:
        node: Any = module
        result = []
        for step in path:
            children = _children(node)
            result.append(list(map(str, children)).index(str(step)))
            node = list(children.values())[result[-1]]
        return result

    return sorted((path for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))), key=places)


def _children(node: Any) -> Mapping[Any, Any]:
    """The attributes, entries or items of a module, mapping or sequence, in definition order."""
    if isinstance(node, nnx.Pytree):
        return vars(node)
    if isinstance(node, Mapping):
        return node
    if isinstance(node, (list, tuple)):
        return dict(enumerate(node))
    raise ConfigError("module", type(node).__name__, "built of nnx modules, mappings, lists and tuples")


def _linen_create(module: nn.Module, example: Any, rng_streams: Sequence[str],
                  kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    def create(key: Any) -> Any:
        return module.init(_streams(("params", *rng_streams), key), example, **kwargs)

    return create


def _linen_order(create: Callable[[Any], Any]) -> Any:
    """The nested names of "params" in the order of their creation; refuses other collections."""
    seen: list[Any] = []

    def record(key: Any) -> Any:
        variables = create(key)  # read here: what a transformation returns has its keys sorted
        seen.append({name: _names(tree) for name, tree in variables.items()})
        return variables

    jax.eval_shape(record, jax.random.key(0))
    for collection, names in seen[0].items():
        if collection not in ("params", "intermediates"):
            first = "/".join([collection, *_first_path(names)])
            raise ConfigError("module state", f"{first} (collection {collection!r})", _STATELESS)
    return seen[0].get("params", OrderedDict())


def _names(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return None
    return OrderedDict((name, _names(child)) for name, child in tree.items())


def _first_path(names: Any) -> list[str]:
    return [] if not names else [next(iter(names)), *_first_path(next(iter(names.values())))]


def _in_order(tree: Any, order: Any) -> Any:
    if order is None:
        return tree
    return OrderedDict((name, _in_order(tree[name], child)) for name, child in order.items())


def _streams(names: Iterable[str], key: Any) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, index) for index, name in enumerate(names)}


def _nested(leaves: Iterable[tuple[Path, Any]]) -> OrderedDict[Any, Any]:
    root: OrderedDict[Any, Any] = OrderedDict()
    for path, leaf in leaves:
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, OrderedDict())
        node[path[-1]] = leaf
    return root


def _leaf(params: Params, path: Path) -> Any:
    for step in path:
        params = params[step]
    return params


def _typed(key: Any) -> jax.Array:
    """A typed key of a typed or raw (`uint32`) one; nnx streams hold typed keys."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def _as_float32(result: Loss) -> Loss:
    loss_sum, weight = result
    return jnp.asarray(loss_sum, jnp.float32), jnp.asarray(weight, jnp.float32)


def _text(path: Path) -> str:
    return "/".join(map(str, path))
