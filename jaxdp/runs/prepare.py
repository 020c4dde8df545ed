"""Everything that may refuse a run once its folder is open, with nothing written yet."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxdp.errors import ConfigError
from jaxdp.ranked import recorder
from jaxdp.ranked.context import RankContext
from jaxdp.runs import job, platform, resume
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.job import Job
from jaxdp.runs.resume import Located
from jaxdp.runs.sample import can_sample


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What is trained, and the checkpoint that it goes on from (None: from the beginning)."""

    job: Job
    start: Located | None

    @property
    def first_step(self) -> int:
        """The first step to be done."""
        return 1 if self.start is None else self.start.state.step + 1


def prepare(config: TrainConfig, folder: Path) -> Prepared:
    """Makes the model, loads the data, finds the devices and the checkpoint. Imports JAX.

    Raises `BadUse` of one kind or another, or `CheckpointError`.
    """
    recorder.note("model and data")
    prepared = job.prepare(config)
    recorder.note("devices")
    platform.check_devices(config.platform, config.devices)
    if config.sample and not can_sample(prepared.model):
        raise ConfigError("sample", True, f"left out for the model {config.model}, whose tokens are not bytes")
    recorder.note("checkpoint to go on from")
    start = resume.starting_point(config.resume, folder)
    if start is not None:
        job.refuse_changes(start.state.identity, prepared.identity)
    recorder.note("trainer and rendezvous")
    return Prepared(prepared, start)


def device_indices(config: TrainConfig, context: RankContext | None) -> tuple[int, ...]:
    """The local devices of this process: the first `devices`; of a rank the one that LOCAL_RANK picks."""
    import jax

    if context is None:
        return tuple(range(config.devices))
    return (context.local_rank if jax.local_device_count() > 1 else 0,)
