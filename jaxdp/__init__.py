"""Data-parallel training in JAX whose bits can be trusted.

The public names, each loaded from its module on first use, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp import models as models
    from jaxdp.buckets import BucketPlan as BucketPlan
    from jaxdp.buckets import plan_buckets as plan_buckets
    from jaxdp.collectives import DeterministicCollective as DeterministicCollective
    from jaxdp.collectives import create_deterministic_collective as create_deterministic_collective
    from jaxdp.config import AdamWConfig as AdamWConfig
    from jaxdp.config import DataParallelConfig as DataParallelConfig
    from jaxdp.digest import tree_digest as tree_digest
    from jaxdp.models.adapters import from_linen as from_linen
    from jaxdp.models.adapters import from_nnx as from_nnx
    from jaxdp.models.model import Model as Model
    from jaxdp.training.metrics import StepMetrics as StepMetrics
    from jaxdp.training.reduce import PsumReducer as PsumReducer
    from jaxdp.training.reduce import all_reduce_gradients as all_reduce_gradients
    from jaxdp.training.trainer import DataParallelTrainer as DataParallelTrainer
    from jaxdp.tree import tree_sum as tree_sum

__version__ = "0.1.0"

_HOME = {
    "AdamWConfig": "config",
    "BucketPlan": "buckets",
    "CollectiveTimeout": "errors",
    "ConfigError": "errors",
    "DataParallelConfig": "config",
    "DataParallelTrainer": "training.trainer",
    "DeterministicCollective": "collectives",
    "JaxdpError": "errors",
    "Model": "models.model",
    "PeerFailure": "errors",
    "PsumReducer": "training.reduce",
    "RankMismatch": "errors",
    "StepMetrics": "training.metrics",
    "all_reduce_gradients": "training.reduce",
    "create_deterministic_collective": "collectives",
    "from_linen": "models.adapters",
    "from_nnx": "models.adapters",
    "plan_buckets": "buckets",
    "tree_digest": "digest",
    "tree_sum": "tree",
}
_MODULES = ("buckets", "collectives", "config", "data", "digest", "errors", "models", "training", "tree")

__all__ = [*_HOME, "models"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"jaxdp.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"jaxdp.{name}")
    raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_MODULES])
