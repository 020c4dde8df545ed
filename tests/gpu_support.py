"""The module of jaxdp built for the GPU of this machine, if both are there."""

from __future__ import annotations

import importlib
from typing import Any


def find_module() -> Any:
    """`jaxdp._cuda` or `jaxdp._rocm` where it loads and sees a device, else None."""
    for name in ("_cuda", "_rocm"):
        try:
            module = importlib.import_module(f"jaxdp.{name}")
        except ImportError:
            continue
        if module.device_count():
            return module
    return None


MODULE = find_module()
NO_GPU = "no GPU with a module of jaxdp built for it"
