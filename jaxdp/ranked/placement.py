"""The environment of each rank that the launcher starts: who it is, and which device it sees. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from jaxdp.errors import ConfigError
from jaxdp.ranked.context import RENDEZVOUS_VARIABLE
from jaxdp.ranked.recorder import RECORDER_VARIABLE

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"

_HOST_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\S*")


def rank_environment(environ: Mapping[str, str], rank: int, world_size: int, platform: str, *, rendezvous: Path,
                     recorder: Path) -> dict[str, str]:
    """`environ` with this launch's values over whatever an older launch or a scheduler left in it.

    On CPU a rank sees one device. On GPUs it sees the one at its place in the visible devices, which
    must be at least `world_size`: else `ConfigError` naming the variable.
    """
    flags = _HOST_DEVICES.sub("", environ.get("XLA_FLAGS", ""))
    return dict(environ) | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        RENDEZVOUS_VARIABLE: str(rendezvous), RECORDER_VARIABLE: str(recorder),
        "XLA_FLAGS": " ".join([*flags.split(), "--xla_force_host_platform_device_count=1"]),
    } | _visible_devices(environ, rank, world_size, platform)


def _visible_devices(environ: Mapping[str, str], rank: int, world_size: int, platform: str) -> dict[str, str]:
    """One GPU a rank: a process of JAX reserves memory on every GPU that it sees.

    ROCR_VISIBLE_DEVICES is left as it is, for what it hides no IPC handle can open; HIP's indices
    count within it. HIP reads CUDA's variable where its own is not set.
    """
    if platform == "auto":
        platform = environ.get("JAX_PLATFORMS", "").partition(",")[0] or platform
    chosen: dict[str, str] = {}
    if platform in ("auto", "cuda", "gpu"):
        chosen |= _narrowed(environ, (CUDA,), CUDA, rank, world_size, platform)
    if platform in ("auto", "rocm", "gpu"):
        chosen |= _narrowed(environ, (HIP, CUDA, ROCR), HIP, rank, world_size, platform)
    return chosen


def _narrowed(environ: Mapping[str, str], sources: tuple[str, ...], target: str, rank: int, world_size: int,
              platform: str) -> dict[str, str]:
    source = next((name for name in sources if name in environ), None)
    if source is None:
        return {target: str(rank)}
    devices = _entries(environ[source])
    if not devices and platform == "auto":  # GPUs are hidden on purpose: the ranks run on CPU
        return {}
    if len(devices) < world_size:
        raise ConfigError(source, environ[source], f"a list of at least {world_size} devices, one for each rank")
    return {target: str(rank) if source == ROCR else devices[rank]}


def _entries(text: str) -> list[str]:
    """What is visible: the entries up to the first -1, which hides itself and what follows."""
    words = (word.strip() for word in text.split(","))
    return [word for word in itertools.takewhile(lambda word: word != "-1", words) if word]
