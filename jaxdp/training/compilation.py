"""Compiles programs that do not need each other side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import jax


class Compilation:
    """Work submitted inside `with Compilation(devices) as compilation:` is done when the block is left.

    XLA compiles outside of Python's lock, so that on CPU threads compile at once. Elsewhere one thread
    does all in order: a compiler that times kernels must have the device for itself. Leaving the block
    raises the first error of the work.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._pool = ThreadPoolExecutor(None if devices[0].platform == "cpu" else 1, "compile")
        self._pending: list[Future[None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        """Begins `work`, or queues it."""
        self._pending.append(self._pool.submit(work))

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        del kind, trace
        self._pool.shutdown(cancel_futures=error is not None)
        for future in self._pending if error is None else ():
            future.result()
