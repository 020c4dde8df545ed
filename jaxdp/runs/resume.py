"""Where a run begins: at step 1, or after a checkpoint that `--resume` names or finds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxdp.errors import CheckpointError, RunFolderError
from jaxdp.runs import checkpoint
from jaxdp.runs.checkpoint import PassedOver, State
from jaxdp.runs.failure import note
from jaxdp.runs.layout import CHECKPOINTS_FOLDER, STATE_FILE, list_steps


@dataclasses.dataclass(frozen=True)
class Located:
    """A state, the step folder that it was loaded from, and the newer steps that were passed over for it."""

    state: State
    folder: Path
    passed_over: tuple[PassedOver, ...] = ()


def locate(path: Path) -> Located:
    """The checkpoint that `path` means: a step's folder, its `state.safetensors`, or the newest good one of a run.

    Tells on stderr what was passed over. Raises `CheckpointError` when there is none that may be
    loaded.
    """
    folder = path.parent if path.name == STATE_FILE else path
    if not folder.exists():
        raise CheckpointError(f"{path} does not exist. Name a run's folder or a step's folder in its checkpoints.")
    checkpoints = folder / CHECKPOINTS_FOLDER if (folder / CHECKPOINTS_FOLDER).is_dir() else folder
    if not list_steps(checkpoints):
        return Located(checkpoint.load(folder), folder)
    located = newest(checkpoints)
    if located is None:
        raise CheckpointError(f"{path} holds no checkpoint that may be loaded.")
    return located


def newest(checkpoints: Path) -> Located | None:
    """The newest good checkpoint of a run, None where there is none; tells what was passed over and why."""
    found = checkpoint.newest_good(checkpoints)
    for skipped in found.passed_over:
        note(f"passed over step {skipped.step}: {skipped.reason}")
    if found.state is None or found.folder is None:
        return None
    return Located(found.state, found.folder, found.passed_over)


def starting_point(resume: str, run: Path) -> Located | None:
    """The checkpoint that a run in the folder `run` goes on from, None for a run from the beginning.

    "auto" without a good checkpoint begins anew and says so. A path outside of `run` is a branch:
    refused with `RunFolderError` where `run` already holds checkpoints, for its records would mix.
    So is a path inside of `run` that is not its newest good one.
    """
    if resume == "never":
        return None
    newest_here = newest(run / CHECKPOINTS_FOLDER)
    if resume == "auto":
        if newest_here is None:
            note(f"{run} holds no checkpoint to go on from; the run begins at step 1")
        return newest_here
    located = locate(Path(resume))
    if newest_here is not None and newest_here.folder.resolve() != located.folder.resolve():
        raise RunFolderError(f"{run} goes on to step {newest_here.state.step}; going on from {located.folder} there "
                             f"would mix two runs. Choose another --output, or --resume auto.")
    return located
