"""Finds a model by name: one of the presets, or `module:attribute` of the user's own."""

from __future__ import annotations

import dataclasses
import importlib
import operator
import os
import sys
from typing import Any

from jaxdp.errors import ConfigError
from jaxdp.models.model import Model
from jaxdp.models.presets import PRESETS, DecoderConfig


def names() -> tuple[str, ...]:
    """The names of the built-in models."""
    return tuple(PRESETS)


def get(name: str, **overrides: Any) -> Model:
    """The model called `name`.

    A built-in name takes fields of `DecoderConfig` as `overrides` (`context=128`,
    `compute_dtype="bfloat16"`). `module:attribute` imports a `Model`, or a function without
    arguments that returns one, with the working directory on the import path; of the overrides it
    takes `compute_dtype`, if the model does. An override of None is left out. Raises `ConfigError`
    naming what is allowed.
    """
    overrides = {field: value for field, value in overrides.items() if value is not None}
    if ":" in name:
        return _override_user_model(_user_model(name), overrides)
    if name not in PRESETS:
        raise ConfigError("model", name, f"one of {', '.join(names())}, or module:attribute")
    fields = [field.name for field in dataclasses.fields(DecoderConfig)]
    for field, value in overrides.items():
        if field not in fields:
            raise ConfigError("model override", f"{field}={value!r}", f"one of {', '.join(fields)}")
    from jaxdp.models.decoder import decoder_model  # here, because it imports JAX and flax

    return decoder_model(dataclasses.replace(PRESETS[name], **overrides), name=name)


def _user_model(name: str) -> Model:
    module_name, _, attribute = name.partition(":")
    try:
        found = operator.attrgetter(attribute)(_import_module(name, module_name))
    except AttributeError:
        raise ConfigError("model", name, f"an attribute that {module_name} has") from None
    model = found if isinstance(found, Model) or not callable(found) else found()
    if not isinstance(model, Model):
        raise ConfigError("model", name, f"a jaxdp.models.Model or a function without arguments that returns one, "
                                         f"not {type(model).__name__}")
    return model


def _import_module(name: str, module_name: str) -> Any:
    """Imports as `python -m` would; an error inside the user's module passes with its traceback."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError("model", name, f"module:attribute, and no module {error.name!r} was found") from None
    except ValueError:
        raise ConfigError("model", name, "module:attribute with the name of a module") from None


def _override_user_model(model: Model, overrides: dict[str, Any]) -> Model:
    compute_dtype = overrides.pop("compute_dtype", "float32")
    for field, value in overrides.items():
        raise ConfigError(field, value, f"left to the model {model.name!r}, which is the user's own")
    if model.with_compute_dtype is not None:
        return model.with_compute_dtype(compute_dtype)
    if compute_dtype != "float32":
        raise ConfigError("compute_dtype", compute_dtype,
                          f"'float32' for the model {model.name!r}, which gives no with_compute_dtype")
    return model
