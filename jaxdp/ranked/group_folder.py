"""The private folder of one launch: rendezvous and flight recorders; gone with the launch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "jaxdp-launch-"
_READY = "ready"


@contextlib.contextmanager
def group_folder() -> Iterator[Path]:
    """A fresh folder that only this user can read, removed at the end.

    A launcher that is killed cannot remove its own: the next one does. An flock on the folder, which
    the kernel ends with its holder, tells the living from the dead, in other containers too.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-"))
    descriptor = _lock(folder)
    try:
        (folder / _READY).touch()  # until now a sweep leaves the folder alone
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.getuid()}-*"):
        if folder.is_symlink() or not (folder / _READY).exists():
            continue
        descriptor = _lock(folder)
        if descriptor is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds `folder`, or None where another process holds it or it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
