"""The ranks of a step, which of them are in this process, and how small host values cross ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxdp.collectives import DeterministicCollective
from jaxdp.collectives.failures import named_failures
from jaxdp.config import DataParallelConfig
from jaxdp.errors import ConfigError
from jaxdp.ranked import recorder
from jaxdp.ranked.context import RankContext, from_environment
from jaxdp.training.spmd import SpmdProgram, stack, unstack


@dataclasses.dataclass(frozen=True)
class World:
    """All ranks of one process, or one rank of several processes (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`)."""

    size: int
    first_rank: int
    devices: tuple[jax.Device, ...]

    @property
    def is_ranked(self) -> bool:
        """Whether other ranks are in other processes."""
        return self.size > len(self.devices)


def make_world(config: DataParallelConfig) -> World:
    """The world that the configuration and the environment describe.

    Raises `ConfigError` for a device that is not there, for more than one device in a ranked process,
    and for shards or a reducer that do not fit the ranks.
    """
    devices = _devices(config.device_indices)
    context = from_environment()
    if context is None:
        return World(len(devices), 0, devices)
    _check_ranked(config, context)
    return World(context.world_size, context.rank, devices)


def _check_ranked(config: DataParallelConfig, context: RankContext) -> None:
    if len(config.device_indices) != 1:
        raise ConfigError("device_indices", config.device_indices, "one device in a ranked process")
    if config.shards is not None and config.shards % context.world_size:
        raise ConfigError("shards", config.shards, f"a power of two that WORLD_SIZE ({context.world_size}) divides")
    if config.reducer == "psum" and context.world_size > 1:
        raise ConfigError("reducer", config.reducer, "'tree' or 'per-parameter' in a ranked process: each rank's "
                                                     "program is its own, and XLA's psum would need jax.distributed")


def _devices(indices: Sequence[int]) -> tuple[jax.Device, ...]:
    local = jax.local_devices()
    if max(indices) >= len(local):
        raise ConfigError("device_indices", tuple(indices), f"below {len(local)}, the number of local devices "
                          f"({local[0].platform})")
    return tuple(local[index] for index in indices)


class Exchange:
    """Gathers small host arrays over all ranks, in rank order; every rank calls it alike."""

    def __init__(self, world: World, collective: DeterministicCollective | None) -> None:
        self._world = world
        self._collective = collective
        self._program = SpmdProgram(self._gather_row, world.devices)

    def gather(self, local: np.ndarray) -> np.ndarray:
        """`(n, ...)` of this process's ranks as `(N, ...)` of all ranks."""
        if not self._world.is_ranked:
            return local
        device = self._world.devices[0]
        stacked = stack([jax.device_put(local[None], device)], self._world.devices)
        shapes = (local.shape, str(local.dtype))
        recorder.note_collective(f"all_gather {local.dtype}{list(local.shape)}")
        with named_failures():
            self._program.prepare(shapes, stacked)
            return np.asarray(unstack(self._program(shapes, stacked), self._world.devices)[0])[0]

    def _gather_row(self, row: jax.Array) -> jax.Array:
        assert self._collective is not None, "a ranked world has a communicator"
        return self._collective.chain().all_gather(row)
