"""Checkpoints: `step-00000010/{state.safetensors, ready.json}`.

`state.safetensors` holds everything that the next step depends on, in bytes that are a function of
that state alone: nothing about world size, host or time. `ready.json` is written after it, in the
same durable way, and says what the contents must be. A step whose marker and contents disagree is
never loaded and never deleted as junk.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp import digest
from jaxdp.errors import CheckpointError
from jaxdp.runs import safetensors_file, strict_json
from jaxdp.runs.files import Files, Written, write_durably
from jaxdp.runs.layout import MARKER_FILE, STATE_FILE, finished_steps, has_marker, list_steps, step_folder

SCHEMA_VERSION = 1
PARAMETER_PREFIX = "parameters/"
_METADATA_KEY = "jaxdp"


@dataclasses.dataclass(frozen=True)
class State:
    """The state after update `step`.

    `tensors` are host arrays by name, parameters under "parameters/". `cursor` is where the data
    goes on. `identity` is what the numbers depend on (model, data, optimizer, seed, shards): a
    resume compares it key by key. Both are plain JSON values.
    """

    step: int
    tensors: Mapping[str, np.ndarray]
    cursor: Mapping[str, Any]
    identity: Mapping[str, Any]

    def parameter_digest(self) -> str:
        """The digest of the parameters alone, as a trainer holding them reports it."""
        leaves = {name.removeprefix(PARAMETER_PREFIX): tensor for name, tensor in self.tensors.items()
                  if name.startswith(PARAMETER_PREFIX)}
        tensors = list(leaves.values())
        return digest.digest_hex(list(leaves), [tensor.shape for tensor in tensors],
                                 [tensor.dtype for tensor in tensors], digest.fingerprints_numpy(tensors))


@dataclasses.dataclass(frozen=True)
class PassedOver:
    """A step that was not loaded, and why."""

    step: int
    folder: Path
    reason: str


@dataclasses.dataclass(frozen=True)
class Found:
    """The newest good state, or None, and the newer steps that were passed over for it."""

    state: State | None
    folder: Path | None
    passed_over: tuple[PassedOver, ...]


def encode(state: State) -> Iterator[memoryview]:
    """The bytes of `state.safetensors`: equal states give equal bytes."""
    return safetensors_file.encode(state.tensors, {_METADATA_KEY: _metadata(state)})


def save(checkpoints: Path, state: State, files: Files | None = None) -> Path:
    """Writes `state` and then its marker; returns the step's folder.

    When it returns, the step survives a power loss. Raises `CheckpointError` naming path, needed
    and free bytes; then every earlier step is as it was and nothing of this one is left behind.
    """
    files = files or Files()
    folder = step_folder(checkpoints, state.step)
    try:
        _make_folder(files, folder)
        written = write_durably(files, folder / STATE_FILE, encode(state))
        write_durably(files, folder / MARKER_FILE, [_marker(state, written)])
    except OSError as error:
        message = _write_failure(files, folder, state, error)
        _remove_unfinished(files, folder)
        raise CheckpointError(message) from error
    return folder


def load(folder: Path) -> State:
    """The state in a step's folder, checked against its marker: size, SHA-256 and parameter digest.

    Raises `CheckpointError` naming the folder and what disagrees.
    """
    marker = read_marker(folder)
    data = _read_state(folder)
    if len(data) != marker["size"]:
        raise CheckpointError(f"{folder}: {STATE_FILE} has {len(data)} bytes; its marker says {marker['size']}.")
    if hashlib.sha256(data).hexdigest() != marker["sha256"]:
        raise CheckpointError(f"{folder}: the SHA-256 of {STATE_FILE} is not the one in its marker.")
    state = _decode(folder, data)
    if state.step != marker["step"] or folder.name != step_folder(folder.parent, state.step).name:
        raise CheckpointError(f"{folder}: {STATE_FILE} holds step {state.step}, its marker says {marker['step']}.")
    if state.parameter_digest() != marker["digest"]:
        raise CheckpointError(f"{folder}: the parameter digest is not the one in the marker.")
    return state


def read_marker(folder: Path) -> dict[str, Any]:
    """What a step's marker says its contents are. Raises `CheckpointError` where it cannot be read."""
    path = folder / MARKER_FILE
    try:
        marker = strict_json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: there is no {MARKER_FILE}; the save did not finish.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {MARKER_FILE} cannot be read: {error}.") from error
    if not isinstance(marker, dict) or not {"step", "size", "sha256", "digest"} <= marker.keys():
        raise CheckpointError(f"{folder}: {MARKER_FILE} lacks step, size, sha256 or digest.")
    return marker


def newest_good(checkpoints: Path) -> Found:
    """The newest step whose marker and contents agree, with what was passed over and why."""
    passed_over = []
    for step, folder in reversed(list_steps(checkpoints)):
        try:
            return Found(load(folder), folder, tuple(passed_over))
        except CheckpointError as error:
            passed_over.append(PassedOver(step, folder, str(error)))
    return Found(None, None, tuple(passed_over))


def retain(checkpoints: Path, keep: int, files: Files | None = None) -> list[Path]:
    """Removes all but the newest `keep` (at least 1) finished steps; returns the removed folders.

    Call it after a `save`, so that an old step goes only once the new marker is down. Unfinished
    steps are left alone. The marker goes first: a step half removed is never taken for a good one.
    """
    files = files or Files()
    removed = [folder for _, folder in finished_steps(checkpoints)[:-keep]]
    for folder in removed:
        files.unlink(folder / MARKER_FILE)
        files.remove_tree(folder)
    return removed


def _metadata(state: State) -> str:
    content = {"schema_version": SCHEMA_VERSION, "step": state.step, "cursor": state.cursor,
               "identity": state.identity}
    return strict_json.dumps(content, sort_keys=True)


def _marker(state: State, written: Written) -> bytes:
    content = {"schema_version": SCHEMA_VERSION, "step": state.step, "size": written.size,
               "sha256": written.sha256, "digest": state.parameter_digest()}
    return strict_json.encode(strict_json.dumps(content) + "\n")


def _make_folder(files: Files, folder: Path) -> None:
    if folder.is_dir():
        return
    files.make_directory(folder)
    files.fsync_directory(folder.parent)
    files.fsync_directory(folder.parent.parent)


def _remove_unfinished(files: Files, folder: Path) -> None:
    try:
        if not has_marker(folder):
            files.unlink(folder / STATE_FILE)
            folder.rmdir()
    except OSError:  # the error that brought us here is the one to report
        return


def _write_failure(files: Files, folder: Path, state: State, error: OSError) -> str:
    needed = safetensors_file.encoded_size(state.tensors, {_METADATA_KEY: _metadata(state)})
    try:
        free = f"{files.free_bytes(_existing_ancestor(folder))} are free"
    except OSError:
        free = "how many are free is not known"
    return (f"The checkpoint of step {state.step} could not be written to {folder}: {error.strerror or error}. "
            f"It needs {needed} bytes; {free}. Earlier checkpoints are untouched.")


def _existing_ancestor(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _read_state(folder: Path) -> bytes:
    try:
        return (folder / STATE_FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder}: {STATE_FILE} cannot be read: {error.strerror}.") from error


def _decode(folder: Path, data: bytes) -> State:
    try:
        tensors, metadata = safetensors_file.decode(data)
        content = strict_json.loads(metadata[_METADATA_KEY])
        version = content["schema_version"]
        if version == SCHEMA_VERSION:
            return State(content["step"], tensors, content["cursor"], content["identity"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {STATE_FILE} is not a checkpoint of jaxdp: {error}.") from error
    raise CheckpointError(f"{folder}: schema version {version} is not {SCHEMA_VERSION}; "
                          f"load it with the release that wrote it.")
