"""`create_deterministic_collective`: the platform boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax

from jaxdp.collectives import native, routing
from jaxdp.collectives.communicator import CallChain, Capabilities, DeterministicCollective
from jaxdp.config import check_choice, check_integer, check_number
from jaxdp.errors import ConfigError

__all__ = ["CallChain", "Capabilities", "DeterministicCollective", "create_deterministic_collective"]

Transport = Literal["auto", "local", "ipc", "xla"]


def create_deterministic_collective(devices: Sequence[jax.Device] | None = None, *, capacity_bytes: int = 64 << 20,
                                    timeout_s: float = 30.0, transport: Transport = "auto",
                                    first_sequence: int = 1) -> DeterministicCollective:
    """Makes the communicator of `devices`, whose rank is their place in the sequence.

    Args:
        devices: 1, 2, 4 or 8 local devices of one kind; None means all local devices.
        capacity_bytes: the most bytes of one call's inputs on one rank.
        timeout_s: the deadline of every wait, in seconds.
        transport: "local" reads peers' buffers in one process; "xla" moves bytes by XLA's own
            collectives and adds locally; "auto" chooses and says why in `capabilities`.
        first_sequence: where the call counter starts (for tests of its limits).

    Raises:
        ConfigError: an argument has a value that is not allowed.
    """
    check_integer("capacity_bytes", capacity_bytes, minimum=1)
    check_number("timeout_s", timeout_s, above=0)
    check_choice("transport", transport, ("auto", "local", "ipc", "xla"))
    members = list(jax.local_devices() if devices is None else devices)
    if len(members) not in (1, 2, 4, 8) or len(set(members)) != len(members):
        raise ConfigError("devices", [str(device) for device in members], "1, 2, 4 or 8 distinct devices")
    chosen, reason = _choose(transport)
    library = native.load()
    group = None
    if chosen == "local":
        group = library.create_local_group([device.local_hardware_id for device in members], timeout_s, first_sequence)
    capabilities = Capabilities(
        backend=members[0].platform, transport=chosen, transport_reason=reason, world_size=len(members),
        device_names=tuple(f"{device.device_kind}:{device.id}" for device in members), capacity_bytes=capacity_bytes,
        timeout_s=timeout_s, routes=routing.table_for(members[0].device_kind))
    return DeterministicCollective(capabilities, group)


def _choose(transport: Transport) -> tuple[str, str]:
    if transport == "auto":
        return "local", "the devices are of one process"
    return transport, "asked for"
