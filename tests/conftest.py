"""Eight CPU devices for every test, chosen before JAX is first imported."""

from __future__ import annotations

import os

DEVICE_COUNT = 8
_FLAG = f"--xla_force_host_platform_device_count={DEVICE_COUNT}"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # a shell's leftovers would make the tests ranked
    os.environ.pop(_name, None)
