"""Loads the native libraries and registers their XLA FFI targets, once a process."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from types import ModuleType

import jax

# JAX's name of a platform, the module that serves it, and XLA's spelling, which must be exact: any
# other is queued in silence and fails when a program is compiled.
_GPU_MODULES = {"cuda": ("_cuda", "CUDA"), "gpu": ("_cuda", "CUDA"), "rocm": ("_rocm", "ROCM")}


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


def gpu_platform(device: jax.Device) -> str:
    """"cuda" or "rocm"; JAX calls both "gpu"."""
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


@functools.cache
def load_gpu(platform: str) -> ModuleType:
    """Returns the module of "cuda" or "rocm" with its targets registered.

    Raises ImportError naming what is missing and how to build it.
    """
    name, xla_platform = _GPU_MODULES[platform]
    try:
        module = importlib.import_module(f"jaxdp.{name}")
    except ImportError as error:
        raise ImportError(f"jaxdp was built without its {platform} code, or that cannot be loaded ({error}). Install "
                          f"with JAXDP_GPU={platform} set, on a machine with the {platform} compiler.") from error
    for target_name, target in module.handlers().items():
        jax.ffi.register_ffi_target(target_name, target, platform=xla_platform)
    return module


def load_for(device: jax.Device) -> ModuleType:
    """Returns the module that serves `device`, its targets registered: what a program with native calls needs."""
    return load() if device.platform == "cpu" else load_gpu(gpu_platform(device))


@dataclasses.dataclass(frozen=True)
class NativeGroup:
    """A communicator's native side: its handle in the library that made it."""

    library: ModuleType
    handle: int

    def calls(self, rank: int) -> int:
        """Calls that `rank` has made."""
        return self.library.group_calls(self.handle, rank)

    def failure(self) -> str:
        """The text of the failure that poisoned the group; empty if none did."""
        return self.library.group_failure(self.handle)

    def close(self) -> str:
        """Ends the group; the text of what went wrong, empty if nothing did."""
        return self.library.close_group(self.handle)
