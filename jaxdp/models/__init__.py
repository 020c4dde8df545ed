"""Models by name, and the adapters for a user's own.

`get`, `names`, `Model` and `DecoderConfig` import neither JAX nor flax until a model is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxdp.models.model import Batch, Model, Params
from jaxdp.models.presets import DecoderConfig
from jaxdp.models.registry import get, names

if TYPE_CHECKING:
    from jaxdp.models.adapters import from_linen, from_nnx
    from jaxdp.models.decoder import decoder_model

__all__ = ["Batch", "DecoderConfig", "Model", "Params", "decoder_model", "from_linen", "from_nnx", "get", "names"]

_LAZY = {"from_linen": "adapters", "from_nnx": "adapters", "decoder_model": "decoder"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
