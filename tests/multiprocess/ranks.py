"""Runs a function of a worker module as W real processes, with a hard deadline and every rank's log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers import ROOT, clean_environment

NURSERY = Path(__file__).with_name("nursery.py")


class Ranks:
    """Starts ranks from one nursery process. One set at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = clean_environment(OPENBLAS_NUM_THREADS="1", PYTHONPATH=str(ROOT / "tests"))
        self._nursery = subprocess.Popen([sys.executable, str(NURSERY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True, env=environment, cwd=ROOT)
        self._logs: list[Path] = []

    def close(self) -> None:
        """Ends the nursery and every rank it still has."""
        self._nursery.communicate(timeout=10)

    def start(self, function: str, world: int, *, ranks: Sequence[int] | None = None, rendezvous: Path | None = None,
              environment: Mapping[str, str] | None = None, **arguments: Any) -> list[int]:
        """Starts `function` ("module:name" below tests/multiprocess) as `ranks` (default: all) of `world`.

        Returns the pids in the order of `ranks`.
        """
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        numbers = list(range(world) if ranks is None else ranks)
        self._logs = [folder / f"{index}-rank-{rank}.log" for index, rank in enumerate(numbers)]
        how = [{"log": str(log), "environment": {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "JAXDP_RENDEZVOUS": str(rendezvous or folder / "rendezvous"), **(environment or {})}}
            for rank, log in zip(numbers, self._logs, strict=True)]
        return self._ask({"function": f"multiprocess.{function}", "arguments": arguments, "ranks": how})["pids"]

    def finish(self, timeout_s: float = 60.0, expect: Sequence[int] | int = 0) -> list[str]:
        """Waits for the ranks, kills what is left at the deadline, and returns their logs.

        Fails with every rank's log unless the exit codes are `expect` (one for all, or one a rank).
        """
        codes = self._ask({"reap": timeout_s})["codes"]
        logs = [log.read_text(errors="replace") if log.exists() else "" for log in self._logs]
        wanted = [expect] * len(codes) if isinstance(expect, int) else list(expect)
        if codes != wanted:
            parts = [f"--- {log.name}, exit {code}\n{text[-4000:]}"
                     for log, code, text in zip(self._logs, codes, logs, strict=True)]
            summary = f"exit codes {codes} (None: killed after {timeout_s:g} s), expected {wanted}"
            raise AssertionError("\n".join([summary, *parts]))
        return logs

    def run(self, function: str, world: int, *, timeout_s: float = 60.0, expect: Sequence[int] | int = 0,
            **how: Any) -> list[str]:
        """`start`, then `finish`."""
        self.start(function, world, **how)
        return self.finish(timeout_s, expect)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        print(json.dumps(request), file=self._nursery.stdin, flush=True)
        return json.loads(self._nursery.stdout.readline())


def shared_memory_in_use() -> int:
    """Bytes taken of /dev/shm, by files with and without a name."""
    room = os.statvfs("/dev/shm")
    return (room.f_blocks - room.f_bfree) * room.f_frsize
