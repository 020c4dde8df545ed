"""`create_deterministic_collective`: the platform boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax

from jaxdp.collectives import gpu, ipc, native, routing
from jaxdp.collectives.communicator import CallChain, Capabilities, DeterministicCollective
from jaxdp.collectives.native import NativeGroup
from jaxdp.config import WORLD_SIZES, check_choice, check_integer, check_number
from jaxdp.errors import ConfigError
from jaxdp.ranked.context import RankContext, from_environment

__all__ = ["CallChain", "Capabilities", "DeterministicCollective", "create_deterministic_collective"]

Transport = Literal["auto", "local", "ipc", "xla"]


def create_deterministic_collective(devices: Sequence[jax.Device] | None = None, *, capacity_bytes: int = 64 << 20,
                                    timeout_s: float = 30.0, transport: Transport = "auto",
                                    first_sequence: int = 1) -> DeterministicCollective:
    """Makes the communicator of `devices`, whose rank is their place in the sequence.

    In a ranked process (`RANK`, `LOCAL_RANK` and `WORLD_SIZE` are set) it makes the communicator of
    all ranks, one device each; every rank calls it, and the same number of times.

    Args:
        devices: 1, 2, 4 or 8 local devices of one kind; None means all local devices. In a ranked
            process one device; None means the only one, or the one that `LOCAL_RANK` picks.
        capacity_bytes: the most bytes of one call's inputs on one rank.
        timeout_s: the deadline of every wait, in seconds.
        transport: "local" reads peers' buffers in one process; "ipc" joins processes of one node by
            shared memory; "xla" moves bytes by XLA's own collectives and adds locally; "auto" chooses
            and says why in `capabilities`.
        first_sequence: where the call counter starts (for tests of its limits).

    Raises:
        ConfigError: an argument, or a rank's environment variable, has a value that is not allowed.
        StagingError, RendezvousError, RankMismatch, PeerFailure, CollectiveTimeout: as `ipc.create_group`.
    """
    check_integer("capacity_bytes", capacity_bytes, minimum=1)
    check_number("timeout_s", timeout_s, above=0)
    if type(first_sequence) is not int or not 0 <= first_sequence < 2**64:
        raise ConfigError("first_sequence", first_sequence, "an integer from 0 to 2**64 - 1")
    check_choice("transport", transport, ("auto", "local", "ipc", "xla"))
    context = from_environment()
    chosen, reason = _choose(transport, context)
    members = _members(devices, chosen, context)
    routes = _routes(chosen, members[0])
    group = _create_group(chosen, members, context, capacity_bytes, timeout_s, first_sequence, routes)
    capabilities = Capabilities(
        backend=members[0].platform, transport=chosen, transport_reason=reason,
        world_size=context.world_size if chosen == "ipc" and context else len(members),
        device_names=tuple(f"{device.device_kind}:{device.id}" for device in members), capacity_bytes=capacity_bytes,
        timeout_s=timeout_s, routes=routes)
    return DeterministicCollective(capabilities, group)


def _create_group(chosen: str, members: list[jax.Device], context: RankContext | None, capacity_bytes: int,
                  timeout_s: float, first_sequence: int, routes: routing.RouteTable) -> NativeGroup | None:
    if members[0].platform != "cpu":
        return gpu.create_group(chosen, members, context, timeout_s)
    library = native.load()
    ordinals = [device.id for device in members]  # what XLA calls the ordinal, under jax.distributed too
    if chosen == "local":
        return NativeGroup(library, library.create_local_group(ordinals, timeout_s, first_sequence))
    if chosen == "ipc" and context is not None:
        handle = ipc.create_group(context, ordinals[0], timeout_s=timeout_s,
                                  one_shot_bytes=_one_shot_bytes(routes, capacity_bytes), first_sequence=first_sequence)
        return NativeGroup(library, handle)
    return None


def _choose(transport: Transport, context: RankContext | None) -> tuple[str, str]:
    if context is None:
        if transport == "ipc":
            raise ConfigError("transport", transport, "'auto', 'local' or 'xla' where RANK, LOCAL_RANK and WORLD_SIZE "
                                                      "are not set (`jaxdp launch` sets them)")
        return ("local", "the devices are of one process") if transport == "auto" else (transport, "asked for")
    ranked = f"this process is rank {context.rank} of {context.world_size} on this node"
    if transport == "auto":
        return "ipc", ranked
    if transport == "local" and context.world_size > 1:
        raise ConfigError("transport", transport, f"'auto' or 'ipc', as {ranked}")
    if transport == "xla" and not jax.distributed.is_initialized():
        raise ConfigError("transport", transport, f"'auto' or 'ipc' unless jax.distributed is initialized, as {ranked}")
    return transport, "asked for"


def _members(devices: Sequence[jax.Device] | None, chosen: str, context: RankContext | None) -> list[jax.Device]:
    if chosen == "ipc" and context is not None:
        return [_rank_device(devices, context)]
    everything = jax.devices() if context is not None and chosen == "xla" else jax.local_devices()
    members = list(everything if devices is None else devices)
    if len(members) not in WORLD_SIZES or len(set(members)) != len(members):
        raise ConfigError("devices", [str(device) for device in members], "1, 2, 4 or 8 distinct devices")
    return members


def _rank_device(devices: Sequence[jax.Device] | None, context: RankContext) -> jax.Device:
    """The one device of a rank: the only one it sees, or the one that LOCAL_RANK picks."""
    seen = list(jax.local_devices() if devices is None else devices)
    if devices is not None and len(seen) != 1:
        raise ConfigError("devices", [str(device) for device in seen], "one device in a ranked process, or None")
    if len(seen) > 1 and context.local_rank >= len(seen):
        raise ConfigError("LOCAL_RANK", context.local_rank, f"below {len(seen)}, the number of devices it picks from")
    return seen[context.local_rank] if len(seen) > 1 else seen[0]


def _routes(chosen: str, device: jax.Device) -> routing.RouteTable:
    if chosen == "xla":
        return routing.rank_major_table(device.device_kind)
    return routing.table_for(f"{device.device_kind}-ipc" if chosen == "ipc" else device.device_kind)


def _one_shot_bytes(routes: routing.RouteTable, capacity_bytes: int) -> int:
    limit = next((route.maximum_bytes for route in routes.all_reduce if route.name == "direct"), 0)
    return capacity_bytes if limit is None else limit
