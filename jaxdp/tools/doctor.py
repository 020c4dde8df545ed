"""`jaxdp doctor`: what this machine and this installation are, as found, without limits of our own."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdp.runs import environment, strict_json
from jaxdp.tools.options import DoctorOptions

DONE, FAILED = 0, 1
_SHARED_MEMORY = Path("/dev/shm")
_DETERMINISM_WORDS = ("determin", "autotune", "combine", "combiner", "disable_hlo_passes", "excess_precision",
                      "fast_math", "fast_min_max")
_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES",
            "JAX_PLATFORMS")
_JAX_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
                 "jax_threefry_partitionable", "jax_numpy_dtype_promotion")


def doctor(options: DoctorOptions) -> int:
    """Prints the findings; returns 1 if JAX cannot start or the native library cannot be loaded."""
    findings = examine()
    if options.json:
        sys.stdout.write(strict_json.dumps(findings, indent=2) + "\n")
    else:
        sys.stdout.write("".join(line + "\n" for line in _lines(findings)))
    return FAILED if "error" in findings["devices"] or "error" in findings["native"] else DONE


def examine() -> dict[str, Any]:
    """Everything that `doctor` shows, by section. A section that could not be read holds its `error`."""
    return {
        "versions": {"python": sys.version.split()[0], **environment.packages()},
        "host": environment.host(),
        "devices": _devices(),
        "visible": {name: os.environ.get(name) for name in _VISIBLE},
        "native": _native(),
        "shared_memory": _shared_memory(),
        "determinism": {"XLA_FLAGS": determinism_flags(os.environ.get("XLA_FLAGS", "")), **_jax_settings()},
        "environment": environment.variables(),
    }


def determinism_flags(xla_flags: str) -> list[str]:
    """The flags of `XLA_FLAGS` that may change the bits of a result."""
    return [flag for flag in shlex.split(xla_flags) if any(word in flag for word in _DETERMINISM_WORDS)]


def _devices() -> dict[str, Any]:
    try:
        import jax

        return {f"{index}": {"device": str(device), "kind": device.device_kind, "platform": device.platform,
                             "bytes_limit": (device.memory_stats() or {}).get("bytes_limit")}
                for index, device in enumerate(jax.local_devices())}
    except Exception as error:
        return {"error": _first_line(error)}


def _native() -> dict[str, Any]:
    try:
        from jaxdp.collectives import native

        library = native.load()
    except Exception as error:
        return {"error": _first_line(error)}
    built_for = [name.removesuffix("_handlers") for name in dir(library) if name.endswith("_handlers")]
    return {"path": library.__file__, "built_for": built_for}


def _shared_memory() -> dict[str, Any]:
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError as error:
        return {"path": str(_SHARED_MEMORY), "error": error.strerror}
    return {"path": str(_SHARED_MEMORY), "total_bytes": usage.total, "free_bytes": usage.free}


def _jax_settings() -> dict[str, Any]:
    import jax

    return {name: jax.config.values.get(name) for name in _JAX_SETTINGS}


def _lines(findings: Mapping[str, Any]) -> list[str]:
    lines = []
    for section, content in findings.items():
        lines.append(section.replace("_", " "))
        lines += [f"  {name}: {_text(value)}" for name, value in content.items()] or ["  (none)"]
    return lines


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items() if item is not None)
    if isinstance(value, list):
        return " ".join(map(str, value)) or "(none set)"
    return "not set" if value is None else str(value)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
