"""The `ipc` transport on CPU: ranks are processes of one node and meet in POSIX shared memory.

Each rank makes one segment with no name in /dev/shm and peers open it by way of /proc, so memory is
given back when its last process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from jaxdp.collectives import native
from jaxdp.collectives.failures import named_failure
from jaxdp.errors import JaxdpError, PeerFailure, RankMismatch, StagingError
from jaxdp.ranked import rendezvous
from jaxdp.ranked.context import RankContext
from jaxdp.ranked.process import Process
from jaxdp.ranked.rendezvous import Record, Rendezvous

SHARED_MEMORY = Path("/dev/shm")
# One of the two payload buffers of a rank; longer messages go in several generations.
STAGING_BYTES = 512 << 10

_numbers = itertools.count(1)  # communicators of this process: the same number on all ranks


def create_group(context: RankContext, device_ordinal: int, *, timeout_s: float, one_shot_bytes: int,
                 first_sequence: int = 1, staging_bytes: int = STAGING_BYTES,
                 shared_memory: Path = SHARED_MEMORY) -> int:
    """The native handle of a group of all ranks of `context`; every rank calls it, in the same order.

    Args:
        device_ordinal: the XLA ordinal of this rank's device.
        timeout_s: the deadline of every wait, in seconds.
        one_shot_bytes: an all_reduce of more bytes than this goes two-shot.
        first_sequence: where the call counter starts.
        staging_bytes: of one payload buffer, a multiple of 4096; two of them are taken a rank.
        shared_memory: a folder in memory, of this node.

    Raises:
        StagingError: shared memory is too small; names it, the bytes asked for and the bytes free.
        RankMismatch: ranks were given different settings.
        PeerFailure: a rank failed or died; its cause is named.
        CollectiveTimeout, RendezvousError: as `ranked.rendezvous`.
    """
    settings = {"staging_bytes": staging_bytes, "one_shot_bytes": one_shot_bytes, "first_sequence": first_sequence}
    library = native.load()
    meeting = rendezvous.join(context, timeout_s)
    topic = f"communicator-{next(_numbers)}"
    with contextlib.ExitStack() as descriptors:
        own = _allocate_or_tell(meeting, topic, timeout_s, shared_memory, staging_bytes)
        descriptors.callback(os.close, own)
        library.initialize_segment(own, staging_bytes, meeting.nonce, context.rank, context.world_size)
        records = meeting.exchange(topic, {"descriptor": own, "settings": settings}, timeout_s)
        _check(records)
        opened = [own if rank == context.rank else _open(meeting, rank, record["descriptor"], descriptors)
                  for rank, record in enumerate(records)]
        handle, failure = library.create_ipc_group(opened, _watch(meeting), staging_bytes, meeting.nonce, context.rank,
                                                   device_ordinal, timeout_s, first_sequence, one_shot_bytes)
    named = named_failure(failure)
    if named is not None:
        raise named
    meeting.forget(topic)
    return handle


def _allocate_or_tell(meeting: Rendezvous, topic: str, timeout_s: float, shared_memory: Path,
                      staging_bytes: int) -> int:
    """`allocate` of a segment; where there is no room, peers are told before it raises."""
    try:
        return allocate(shared_memory, native.load().segment_file_bytes(staging_bytes))
    except StagingError as error:
        with contextlib.suppress(JaxdpError):
            meeting.exchange(topic, {"error": str(error)}, timeout_s)
        raise


def allocate(shared_memory: Path, file_bytes: int) -> int:
    """The descriptor of a file of `file_bytes` zeros without a name, every page of it there.

    Raises `StagingError` naming folder, bytes asked for and bytes free; without it a page that cannot
    be had would be a SIGBUS at its first use.
    """
    try:
        descriptor = os.open(shared_memory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StagingError(f"{shared_memory} cannot hold shared memory: {error.strerror}.") from error
    try:
        os.posix_fallocate(descriptor, 0, file_bytes)
    except OSError as error:
        os.close(descriptor)
        room = os.statvfs(shared_memory)
        raise StagingError(
            f"{shared_memory} has no room for a rank's staging ({error.strerror}): {file_bytes} bytes asked for, "
            f"{room.f_bavail * room.f_frsize} free of {room.f_blocks * room.f_frsize}. Free some, or mount it larger "
            "(in Docker: --shm-size).") from error
    return descriptor


def _check(records: Sequence[Record]) -> None:
    """All ranks see the same records, and so raise the same."""
    for rank, record in enumerate(records):
        if "error" in record:
            raise PeerFailure(f"rank {rank} could not make its shared memory: {record['error']}")
        if record["settings"] != records[0]["settings"]:
            raise RankMismatch(f"communicator settings must be equal on all ranks; rank 0 has "
                               f"{records[0]['settings']}, rank {rank} has {record['settings']}.")


def _open(meeting: Rendezvous, rank: int, number: int, descriptors: contextlib.ExitStack) -> int:
    """A descriptor of this process for the segment that is descriptor `number` of `rank`'s process."""
    process = meeting.processes[rank]
    try:
        descriptor = os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerFailure(f"the shared memory of rank {rank} ({process}) cannot be opened: {error}.") from error
    descriptors.callback(os.close, descriptor)
    return descriptor


def _watch(meeting: Rendezvous) -> list[int]:
    """A pidfd a rank; -1 for this rank, and for all where the kernel or a sandbox has none to give."""
    return [-1 if rank == meeting.context.rank else _pidfd(rank, process)
            for rank, process in enumerate(meeting.processes)]


def _pidfd(rank: int, process: Process) -> int:
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        descriptor = None
    except OSError:
        return -1
    if descriptor is None or not process.alive():  # asked after the open: the pid cannot be reused from here on
        raise PeerFailure(f"rank {rank} ({process}) died while the communicator was made.")
    return descriptor
