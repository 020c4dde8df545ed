"""One compiled executable, loaded on several devices: the very same machine code on each.

`jit` would compile a program again for every device. Compiling once and loading the serialized
executable elsewhere is quicker, and makes "the same executable" true in the literal sense.
"""

from __future__ import annotations

import functools
import io
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import serialize_executable


class PortableExecutable:
    """A single-device `compiled`, serialized once, when it is first wanted on another device."""

    def __init__(self, compiled: jax.stages.Compiled) -> None:
        self.compiled = compiled

    def load_on(self, device: jax.Device) -> jax.stages.Compiled:
        """A copy that runs on `device` (of the same client)."""
        serialized, in_tree, out_tree = self._serialized
        executable, arguments, no_kwargs = _Placer(serialized, device).load()
        return jax.stages.Compiled(executable.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)

    @functools.cached_property
    def _serialized(self) -> tuple[bytes, Any, Any]:
        return serialize_executable.serialize(self.compiled)


class _Placer(serialize_executable._JaxPjrtUnpickler):
    """Reads a serialized executable with `device` in place of the one it was compiled for."""

    def __init__(self, serialized: bytes, device: jax.Device) -> None:
        super().__init__(io.BytesIO(serialized), device.client, [device])
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "device":
            return self._device
        if pid[0] == "exec":
            options = compiler.get_compile_options(num_replicas=1, num_partitions=1,
                                                   device_assignment=np.array([[self._device.id]]))
            return self.backend.deserialize_executable(pid[1], executable_devices=self.execution_devices,
                                                       compile_options=options)
        return super().persistent_load(pid)
