"""Chooses where JAX runs. Call `select` before JAX is first imported; later it changes nothing."""

from __future__ import annotations

import os
import re

from jaxdp.errors import ConfigError
from jaxdp.runs.config import Platform

_HOST_DEVICES = "--xla_force_host_platform_device_count"


def select(platform: Platform, devices: int) -> None:
    """Sets `JAX_PLATFORMS` and, where the CPU may be chosen, asks XLA for that many host devices.

    Flags that are already in `XLA_FLAGS` stay; a larger number of host devices stays too.
    """
    if platform != "auto":
        os.environ["JAX_PLATFORMS"] = platform
    if platform in ("auto", "cpu"):
        os.environ["XLA_FLAGS"] = _with_host_devices(os.environ.get("XLA_FLAGS", ""), devices)


def check_devices(platform: Platform, devices: int) -> None:
    """Raises `ConfigError` when the platform cannot be started or has fewer devices. Starts JAX's backend."""
    import jax

    try:
        found = jax.local_devices()
    except RuntimeError as error:
        raise ConfigError("platform", platform, f"one that JAX can start here ({_first_line(error)})") from None
    if len(found) < devices:
        raise ConfigError("devices", devices, f"at most {len(found)}, the {found[0].platform} devices that are visible")


def _with_host_devices(flags: str, devices: int) -> str:
    asked = [int(count) for count in re.findall(rf"{_HOST_DEVICES}=(\d+)", flags)]
    if asked and asked[-1] >= devices:
        return flags
    return f"{flags} {_HOST_DEVICES}={devices}".strip()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
