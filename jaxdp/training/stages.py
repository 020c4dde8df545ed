"""What both step modes hand back, and how time is taken."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """Host values of one step: the report of `step.update` plus `stats` float32[parts, 2]."""

    report: Mapping[str, Any]
    compile_ms: float
    total_ms: float
    forward_backward_ms: float | None = None
    communication_ms: float | None = None
    optimizer_ms: float | None = None


class Stopwatch:
    """Milliseconds on the monotonic clock."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Milliseconds since the start or the last lap."""
        now = time.perf_counter()
        elapsed, self._start = (now - self._start) * 1e3, now
        return elapsed


def batch_shapes(batch: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """A hashable description of a batch: what a compiled program is valid for."""
    return tuple(sorted((name, tuple(x.shape), str(x.dtype)) for name, x in batch.items()))
