"""What every rank but 0 of a ranked run does: the same steps, without a word and without a file."""

from __future__ import annotations

from pathlib import Path

from jaxdp.ranked.context import RankContext
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.failure import DONE
from jaxdp.runs.layout import CHECKPOINTS_FOLDER
from jaxdp.runs.stop import FollowedStop


def follow(config: TrainConfig, context: RankContext) -> int:
    """Trains as rank `context.rank`; returns the exit code of the whole run where all goes well.

    Raises what stops it: rank 0 alone writes the run's package.
    """
    from jaxdp.runs.keeper import Peer
    from jaxdp.runs.loop import Loop
    from jaxdp.runs.prepare import device_indices, prepare
    from jaxdp.training.trainer import DataParallelTrainer

    folder = Path(config.output or "")
    prepared = prepare(config, folder)
    if prepared.first_step > config.steps:
        return DONE
    keeper = Peer(folder / CHECKPOINTS_FOLDER, context.rank, config.checkpoint_timeout)
    data_parallel = config.data_parallel(device_indices(config, context))
    with FollowedStop(folder) as stop, DataParallelTrainer(prepared.job.model, config.seed, data_parallel) as trainer:
        loop = Loop(config, prepared.job, trainer, keeper, prepared.start and prepared.start.state, context.rank)
        last = loop.run(stop)
    return DONE if last == config.steps else stop.exit_code
