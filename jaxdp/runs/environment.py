"""What a manifest says about where a run took place. Reading it changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ("jaxdp", "jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt",
             "flax", "optax", "numpy", "ml_dtypes", "safetensors")
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "XLA_FLAGS", "LD_LIBRARY_PATH",
              "OMP_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL", "LIBTPU_INIT_ARGS")
_PREFIXES = ("JAX_", "JAXDP_", "XLA_", "NCCL_", "RCCL_", "HIP_", "HSA_", "ROCR_", "ROCM_", "GPU_", "CUDA_", "AMD_",
             "SLURM_")
_GIT_TIMEOUT_S = 10


def repository(folder: Path | None = None) -> dict[str, Any]:
    """`{"commit", "branch", "dirty"}` of the checkout that the package lies in, else of `folder`'s.

    `folder` defaults to the working directory. All three are None outside a checkout, or where git
    is not installed; `branch` is None on a detached head. Untracked files do not make it dirty.
    """
    candidates = (Path(__file__).resolve().parent, folder or Path.cwd())
    folder = next((candidate for candidate in candidates if _git(candidate, "rev-parse", "HEAD")), candidates[0])
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    branch = _git(folder, "symbolic-ref", "--short", "--quiet", "HEAD") if commit else None
    return {"commit": commit, "branch": branch or None, "dirty": None if status is None else bool(status)}


def host() -> dict[str, Any]:
    """Name, system, processor architecture, usable cores, memory and Python of this machine."""
    return {"name": platform.node(), "system": platform.platform(), "machine": platform.machine(),
            "cpu_count": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "python": platform.python_version()}


def packages() -> dict[str, str]:
    """The versions of the packages that a step's numbers or its speed may depend on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def variables() -> dict[str, str]:
    """The environment variables that steer JAX, XLA, the GPU runtimes and ranks."""
    return {name: value for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)}


def devices() -> list[dict[str, Any]]:
    """Every device that JAX sees in this process. Starts JAX's backend."""
    import jax

    return [{"index": index, "platform": device.platform, "kind": device.device_kind, "process": device.process_index}
            for index, device in enumerate(jax.devices())]


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True,
                              timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
