"""What the benches share: devices, interleaved timing, and records that name machine and command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def use_platform(name: str, world: int) -> None:
    """Chooses the JAX platform and, on CPU, the number of host devices; before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "cuda": "cuda", "rocm": "rocm"}[name]
    if name == "cpu":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={world}".strip()


def interleaved(runs: Mapping[str, Callable[[], Any]], *, samples: int) -> dict[str, list[float]]:
    """Seconds of each run, taken in turn A B A B ..., so that a slow moment meets all alike.

    Each run must wait for its own result.
    """
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(samples):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def summary_us(seconds: list[float], calls: int) -> dict[str, float | int]:
    """Median, minimum and maximum of the time of one call, in microseconds."""
    per_call = [value / calls * 1e6 for value in seconds]
    return {"median": statistics.median(per_call), "min": min(per_call), "max": max(per_call), "samples": len(per_call)}


def paired_ratio(numerator: list[float], denominator: list[float]) -> float:
    """The median of the ratios of samples that were taken one after the other."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    import jax

    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.processor())
    return {"cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()[0],
            "devices": [f"{device.device_kind}:{device.id}" for device in jax.devices()],
            "python": platform.python_version(), "jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}


def write_results(path: Path | None, name: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Writes one JSON file of a run, if a path is given."""
    if path is None:
        return
    record = {"bench": name, "created_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
              "command": " ".join(["python", *sys.argv]), "machine": machine(), **facts, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")
