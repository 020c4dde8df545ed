"""The system calls behind a durable file, one method each, and the one order they are made in.

`Files` is a seam: a test passes a subclass that fails, or stops the process, at any one call.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Chunk = bytes | bytearray | memoryview


class Files:
    """The operating system's file calls."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def fsync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


@dataclass(frozen=True)
class Written:
    """What was written: `size` in bytes and the hex SHA-256 of the contents."""

    size: int
    sha256: str


def write_durably(files: Files, path: Path, chunks: Iterable[Chunk]) -> Written:
    """Writes `path` so that after a crash it has its old contents or all of the new.

    The order: temporary in the same folder, write, fsync file, rename, fsync folder. When it
    returns the contents survive a power loss. On any error the temporary is removed and the error
    goes on; a temporary that a dead process left behind is overwritten. One writer a path: the
    caller owns the folder.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        written = _write_and_sync(files, temporary, chunks)
        files.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise
    files.fsync_directory(path.parent)
    return written


def _write_and_sync(files: Files, path: Path, chunks: Iterable[Chunk]) -> Written:
    digest, size = hashlib.sha256(), 0
    descriptor = files.create(path)
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            digest.update(rest)
            size += rest.nbytes
            while rest.nbytes:
                rest = rest[files.write(descriptor, rest):]
        files.fsync(descriptor)
    finally:
        files.close(descriptor)
    return Written(size, digest.hexdigest())
