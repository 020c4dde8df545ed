"""Loads the native library and registers its XLA FFI targets, once a process."""

from __future__ import annotations

import functools
from types import ModuleType

import jax


@functools.cache
def load() -> ModuleType:
    """Returns the native module with its CPU targets registered.

    Raises ImportError naming what to build if the extension is missing.
    """
    try:
        from jaxdp import _native  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise ImportError(f"jaxdp's native library is not there ({error}). Install with `pip install .` "
                          "(needs g++ or clang++), or run `make test`, which builds it.") from error
    for name, target in _native.cpu_handlers().items():
        jax.ffi.register_ffi_target(name, target, platform="cpu")
    return _native
