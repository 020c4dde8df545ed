"""The output folder: opened for one run, or refused before anything expensive."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path

from jaxdp.errors import RunFolderError
from jaxdp.runs import strict_json
from jaxdp.runs.layout import CHECKPOINTS_FOLDER, METRICS_FILE, list_steps
from jaxdp.runs.lock import FolderLock


def new_folder(parent: Path, model: str) -> Path:
    """Creates `parent/<UTC time>-<model>`, a name that no other launch can get."""
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in model)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        folder = parent / (f"{stamp}-{name}" if attempt == 1 else f"{stamp}-{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unusable(folder, error) from error
        return folder
    raise AssertionError("unreachable")


def open_folder(folder: Path, *, resume: bool) -> FolderLock:
    """Creates `folder` where needed and takes its lock; the caller releases it.

    Raises `RunFolderError` for a folder that cannot be written, that a live run owns, or that holds
    a run while `resume` is False. A folder whose run never finished a step holds no run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    if not resume and holds_run(folder):
        lock.release()
        raise RunFolderError(f"{folder} already holds a run. Go on with it by --resume auto, "
                             f"or choose another --output.")
    return lock


def holds_run(folder: Path) -> bool:
    """Whether `folder` has the record of a step, or a checkpoint, whole or not."""
    has_record = next(strict_json.record_lines(folder / METRICS_FILE), None) is not None
    return has_record or bool(list_steps(folder / CHECKPOINTS_FOLDER))


def _unusable(folder: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"--output {folder} cannot be used: {error.strerror or error}. "
                          f"Choose a folder that can be created and written.")
