"""One rank's end of an ipc group, driven without XLA: thousands of calls a second, one thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.collectives import ipc, native
from jaxdp.collectives.failures import named_failure
from jaxdp.collectives.operations import Operation
from jaxdp.ranked.context import RankContext, from_environment

_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
ONE_SHOT, TWO_SHOT = 1 << 40, 0  # values of `one_shot_bytes` that send every message one way


class Member:
    """The rank that the environment names. Raises failures by their names, as the communicator does."""

    def __init__(self, *, timeout_s: float = 20.0, one_shot_bytes: int = ONE_SHOT, staging_bytes: int = 4096,
                 first_sequence: int = 1, shared_memory: Path = ipc.SHARED_MEMORY) -> None:
        context = from_environment()
        assert context is not None
        self.context: RankContext = context
        self.rank, self.world = context.rank, context.world_size
        self.handle = ipc.create_group(context, 0, timeout_s=timeout_s, one_shot_bytes=one_shot_bytes,
                                       first_sequence=first_sequence, staging_bytes=staging_bytes,
                                       shared_memory=shared_memory)

    def all_reduce(self, *lanes: np.ndarray) -> list[np.ndarray]:
        return self.call(Operation.ALL_REDUCE, lanes, [lane.shape for lane in lanes])

    def reduce_scatter(self, *lanes: np.ndarray) -> list[np.ndarray]:
        shapes = [(len(lane) // self.world, *lane.shape[1:]) for lane in lanes]
        return self.call(Operation.REDUCE_SCATTER, lanes, shapes)

    def all_gather(self, *lanes: np.ndarray) -> list[np.ndarray]:
        shapes = [(len(lane) * self.world, *lane.shape[1:]) for lane in lanes]
        return self.call(Operation.ALL_GATHER, lanes, shapes)

    def barrier(self) -> None:
        self.call(Operation.BARRIER, (), [])

    def call(self, operation: Operation, lanes: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]],
             signature: str | None = None) -> list[np.ndarray]:
        """One call; results are filled with a pattern first, so that a byte not written shows."""
        results = [np.full(shape, 0x5A, np.uint8).repeat(lane.itemsize).view(lane.dtype).reshape(shape)
                   for lane, shape in zip(lanes, shapes, strict=True)]
        if signature is None:
            signature = " ".join([operation.name.lower(), *(f"{lane.dtype}{list(lane.shape)}" for lane in lanes)])
        failure = named_failure(native.load().call_group(
            self.handle, self.rank, int(operation), [_DTYPES.get(lane.dtype.name, 0) for lane in lanes],
            [_raw(lane) for lane in lanes], [_raw(result) for result in results], signature))
        if failure is not None:
            raise failure
        return results

    def calls(self) -> int:
        return native.load().group_calls(self.handle, self.rank)

    def close(self) -> None:
        failure = named_failure(native.load().close_group(self.handle))
        if failure is not None:
            raise failure


def _raw(array: np.ndarray) -> Any:
    """The same memory in a dtype that has a buffer protocol: bfloat16 has none."""
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array
