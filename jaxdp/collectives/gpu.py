"""Groups of GPUs: peer access inside one process, IPC handles between processes."""

from __future__ import annotations

import itertools

import jax

from jaxdp.collectives import native
from jaxdp.collectives.native import NativeGroup
from jaxdp.errors import PeerFailure
from jaxdp.ranked import rendezvous
from jaxdp.ranked.context import RankContext

# Blocks of 512 threads that one call may use; native code lowers it to what is resident together.
# H200 x 2, 2026-11-30, bench/gpu_tune.sh.
MAXIMUM_BLOCKS = 256

_numbers = itertools.count(1)  # communicators of this process: the same number on all ranks


def create_group(transport: str, members: list[jax.Device], context: RankContext | None,
                 timeout_s: float) -> NativeGroup | None:
    """The native group of a transport; None for "xla", whose local tree still needs the library.

    Raises:
        ImportError: jaxdp was built without the code for this GPU.
        RuntimeError: memory or peer access cannot be had; names device and bytes.
        PeerFailure, CollectiveTimeout, RendezvousError: between processes, as `ranked.rendezvous`.
    """
    library = native.load_gpu(native.gpu_platform(members[0]))
    if transport == "local":
        devices = [device.local_hardware_id for device in members]
        return NativeGroup(library, library.create_local_group(devices, timeout_s, MAXIMUM_BLOCKS))
    if transport == "ipc" and context is not None:
        return _create_ranked(NativeGroup(library, library.create_rank(
            context.rank, context.world_size, members[0].local_hardware_id, timeout_s, MAXIMUM_BLOCKS)), context,
            timeout_s)
    return None


def _create_ranked(group: NativeGroup, context: RankContext, timeout_s: float) -> NativeGroup:
    """Exchanges addresses, once; every rank has mapped every peer when it returns."""
    meeting = rendezvous.join(context, timeout_s)
    topic = f"gpu-communicator-{next(_numbers)}"
    address = group.library.export_rank(group.handle, context.rank)
    records = meeting.exchange(topic, {"address": address.hex()}, timeout_s)
    for rank, record in enumerate(records):
        if rank != context.rank:
            try:
                group.library.connect_rank(group.handle, rank, bytes.fromhex(str(record["address"])))
            except RuntimeError as error:
                raise PeerFailure(f"the GPU memory of rank {rank} cannot be mapped: {error}") from error
    meeting.exchange(f"{topic}-mapped", {}, timeout_s)
    meeting.forget(topic)
    return group
