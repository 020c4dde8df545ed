"""Small records in a shared folder: whole or not there, and never touched by two ranks at once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdp.errors import CollectiveTimeout

SUFFIX = ".jaxdp"
_LOCK_RETRY_S = 0.002


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Publishes `record` at `path` in one step: temporary, fsync, rename.

    The first line is the byte count of the rest, so that a reader knows a file that some accident
    cut short.
    """
    body = json.dumps(record, sort_keys=True).encode()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp{SUFFIX}")
    with open(temporary, "wb") as file:
        file.write(b"%d\n%b" % (len(body), body))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def read_record(path: Path) -> dict[str, Any] | None:
    """The record at `path`; None where there is none or its byte count is not the one it states."""
    try:
        count, _, body = path.read_bytes().partition(b"\n")
        record = json.loads(body) if int(count) == len(body) else None
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


@contextlib.contextmanager
def exclusive(folder: Path, timeout_s: float) -> Iterator[None]:
    """Holds `folder`, made if it is missing, against every other `exclusive` holder.

    The lock is `flock` on the folder itself: it leaves no file, and the kernel ends it with its
    holder. Raises `CollectiveTimeout` if another process keeps it.
    """
    deadline = time.monotonic() + timeout_s
    while (descriptor := _try_lock(folder)) is None:
        if time.monotonic() >= deadline:
            raise CollectiveTimeout(f"{folder} stayed locked by another process for {timeout_s:g} s.")
        time.sleep(_LOCK_RETRY_S)
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(folder: Path) -> int | None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # removed by the last rank of an ending run
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    os.close(descriptor)
    return None
