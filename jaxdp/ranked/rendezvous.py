"""Where the ranks of one run on one node meet, and how they exchange small facts before memory is shared.

A run is its rank 0's random nonce. Each rank holds a place, `rank-R`, in the run's folder until it
exits; a record counts only while the process that wrote it lives. So whatever a dead run left
behind is harmless, and a place of a live one is never taken.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdp.errors import CollectiveTimeout, PeerFailure, RendezvousError
from jaxdp.ranked.context import RENDEZVOUS_VARIABLE, RankContext
from jaxdp.ranked.process import Process
from jaxdp.ranked.records import SUFFIX, exclusive, read_record, write_record

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_EXIT_LOCK_S = 2.0

Record = dict[str, Any]


class Rendezvous:
    """This process's place in a run, held from construction until `leave()` or the process's end.

    All ranks construct it; it returns when every rank of `context.world_size` is there.
    `nonce` (63 bits, not 0) is equal on all ranks of the run and on no others; `processes` holds the
    ranks' processes in rank order.

    Raises:
        RendezvousError: the place is taken by a live process, or a rank has another world size.
        CollectiveTimeout: some ranks did not come within `timeout_s`; it names who came and who did not.
        PeerFailure: a rank came and then left or died.
    """

    def __init__(self, context: RankContext, timeout_s: float) -> None:
        self.context = context
        self.nonce = secrets.randbits(63) | 1 if context.rank == 0 else 0
        self._came: dict[int, Process] = {}
        self._process = Process.current()
        self._claim(timeout_s)
        try:
            self.processes = self._meet(timeout_s)
        except BaseException:
            self.leave()
            raise
        atexit.register(self.leave)

    @property
    def alive(self) -> bool:
        """False in a forked child: the place is its parent's."""
        return self._process.pid == os.getpid()

    def exchange(self, topic: str, payload: Mapping[str, Any], timeout_s: float) -> tuple[Record, ...]:
        """Every rank's `payload` of one `topic`, in rank order; all ranks call it with the same topics.

        Raises `CollectiveTimeout` and `PeerFailure` as the constructor does.
        """
        write_record(self._path(topic, self.context.rank), payload)
        return self._wait_for_all(lambda rank: read_record(self._path(topic, rank)), timeout_s, topic)

    def forget(self, topic: str) -> None:
        """Removes this rank's payload; call it when all ranks are known to have it."""
        self._path(topic, self.context.rank).unlink(missing_ok=True)

    def leave(self) -> None:
        """Gives the place up; the last rank takes the run's remaining records and the folder along."""
        if not self.alive:
            return
        atexit.unregister(self.leave)
        with contextlib.suppress(OSError, CollectiveTimeout), exclusive(self.context.rendezvous, _EXIT_LOCK_S):
            self._slot(self.context.rank).unlink(missing_ok=True)
            if not any(self._live_record(rank) for rank in range(self.context.world_size)):
                self._sweep()
            with contextlib.suppress(OSError):  # not empty
                self.context.rendezvous.rmdir()

    def _claim(self, timeout_s: float) -> None:
        folder, rank = self.context.rendezvous, self.context.rank
        with exclusive(folder, timeout_s):
            if folder.stat().st_uid != os.getuid():
                raise RendezvousError(f"{folder} is another user's; set {RENDEZVOUS_VARIABLE} to a folder of yours.")
            owner = self._live_record(rank)
            if owner is not None:
                raise RendezvousError(
                    f"rank {rank} in {folder} is taken by live {_process_of(owner)}. Give each rank a RANK of its own, "
                    f"and each run a {RENDEZVOUS_VARIABLE} folder (or MASTER_PORT) of its own.")
            if rank == 0:
                self._sweep()
            self._publish()

    def _publish(self) -> None:
        write_record(self._slot(self.context.rank), {
            "rank": self.context.rank, "world_size": self.context.world_size, "nonce": self.nonce,
            "pid": self._process.pid, "start_ticks": self._process.start_ticks})

    def _meet(self, timeout_s: float) -> tuple[Process, ...]:
        self._wait_for_all(self._member, timeout_s, "start")
        return tuple(self._came[rank] for rank in range(self.context.world_size))

    def _member(self, rank: int) -> Record | None:
        """The record of `rank` if it has joined this run and lives; takes up rank 0's nonce on the way."""
        record = read_record(self._slot(rank))
        if record is not None and self.nonce and record.get("nonce") == self.nonce:
            self._came[rank] = _process_of(record)  # noted though it may have died since
        record = _of_live_process(record)
        if record is None:
            return None
        if record["world_size"] != self.context.world_size:
            raise RendezvousError(f"WORLD_SIZE must be equal on all ranks; rank {rank} has {record['world_size']}, "
                                  f"rank {self.context.rank} has {self.context.world_size}.")
        if rank == 0 and self.nonce != record["nonce"]:
            self.nonce = record["nonce"]
            self._publish()
            self._came[rank] = _process_of(record)
        return record if record["nonce"] == self.nonce else None

    def _wait_for_all(self, read: Callable[[int], Record | None], timeout_s: float, topic: str) -> tuple[Record, ...]:
        begin = time.monotonic()
        pauses = _pauses()
        while True:
            records = [read(rank) for rank in range(self.context.world_size)]
            present = tuple(record for record in records if record is not None)
            if len(present) == len(records):
                return present
            waited_s = time.monotonic() - begin
            gone = [rank for rank in self._came
                    if records[rank] is None and self._live_record(rank) is None and read(rank) is None]
            if gone:
                raise PeerFailure(self._who_came(records, gone, waited_s, topic))
            if waited_s >= timeout_s:
                raise CollectiveTimeout(self._who_came(records, [], waited_s, topic))
            time.sleep(next(pauses))

    def _who_came(self, records: list[Record | None], gone: list[int], waited_s: float, topic: str) -> str:
        came = [rank for rank, record in enumerate(records) if record is not None]
        absent = [rank for rank in range(len(records)) if rank not in [*came, *gone]]
        lists = {"came": came, "came and left or died": gone, "did not come": absent}
        text = "; ".join(f"{what}: {', '.join(map(str, ranks))}" for what, ranks in lists.items() if ranks)
        where = f"{topic}: rank {self.context.rank} waited {waited_s:.1f} s in {self.context.rendezvous}"
        return " ".join([f"{where}; {text}.", *filter(None, map(self._why_absent, absent))])

    def _why_absent(self, rank: int) -> str:
        slot = self._slot(rank)
        if not slot.exists():
            return ""
        if read_record(slot) is None:
            return f"{slot} is incomplete ({slot.stat().st_size} bytes)."
        record = self._live_record(rank)
        return f"{slot} is of a dead process." if record is None else f"{slot} is of live {_process_of(record)}."

    def _live_record(self, rank: int) -> Record | None:
        return _of_live_process(read_record(self._slot(rank)))

    def _sweep(self) -> None:
        """Removes all but live processes' places; called with the folder held, by rank 0 or the last rank."""
        for path in self.context.rendezvous.glob(f"*{SUFFIX}"):
            if _of_live_process(read_record(path)) is None:
                path.unlink(missing_ok=True)

    def _slot(self, rank: int) -> Path:
        return self.context.rendezvous / f"rank-{rank}{SUFFIX}"

    def _path(self, topic: str, rank: int) -> Path:
        return self.context.rendezvous / f"{self.nonce:016x}-{topic}-rank-{rank}{SUFFIX}"


_joined: dict[Path, Rendezvous] = {}
_joining = threading.Lock()


def join(context: RankContext, timeout_s: float) -> Rendezvous:
    """This process's rendezvous in `context`, made on the first call and shared by all later ones."""
    with _joining:
        known = _joined.get(context.rendezvous)
        if known is None or not known.alive or known.context != context:
            known = _joined[context.rendezvous] = Rendezvous(context, timeout_s)
        return known


def _process_of(record: Record) -> Process:
    return Process(record["pid"], record["start_ticks"])


def _of_live_process(record: Record | None) -> Record | None:
    try:
        return record if record is not None and _process_of(record).alive() else None
    except KeyError:  # a payload, or of another version
        return None


def _pauses() -> Iterator[float]:
    pause = _SHORTEST_PAUSE_S
    while True:
        yield pause
        pause = min(1.5 * pause, _LONGEST_PAUSE_S)
