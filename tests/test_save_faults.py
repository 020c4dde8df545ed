"""A save that is killed for good at any file operation, and markers that belong to other contents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import run_python

from jaxdp.runs import resume
from jaxdp.runs.checkpoint import State, newest_good, save
from jaxdp.runs.files import Files
from jaxdp.runs.layout import step_folder

# Forks one process an operation: each saves, or cleans up, and kills itself in the middle of that operation.
KILLER = """
import json, os, pathlib, signal, sys, warnings
import numpy as np
from jaxdp.runs.checkpoint import State, retain, save
from jaxdp.runs.files import Files

class KilledAt(Files):
    def __init__(self, fatal):
        self.left = fatal

    def die(self):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

def killing(name):
    def call(self, *arguments):
        if name == "write" and self.left == 0:  # half of it reaches the disk
            Files.write(self, arguments[0], arguments[1][:arguments[1].nbytes // 2])
        self.die()
        return getattr(Files, name)(self, *arguments)
    return call

for name in ("make_directory", "create", "write", "fsync", "close", "replace", "fsync_directory", "unlink",
             "remove_tree"):
    setattr(KilledAt, name, killing(name))

def state(step):
    return State(step, {"parameters/w": np.arange(64, dtype=np.float32) + step}, {"samples": step}, {"seed": 0})

def attempt(folder, fatal):
    files = KilledAt(fatal)
    save(folder, state(2))
    save(folder, state(4), files)
    retain(folder, 1, files)

warnings.simplefilter("ignore")
root = pathlib.Path(sys.argv[1])
statuses = []
while not statuses or os.WIFSIGNALED(statuses[-1]):
    fatal = len(statuses)
    child = os.fork()
    if child == 0:
        attempt(root / str(fatal), fatal)
        os._exit(0)
    statuses.append(os.waitpid(child, 0)[1])
print(json.dumps([os.WTERMSIG(status) for status in statuses]))
"""


def state(step: int, add: float = 0.0) -> State:
    return State(step, {"parameters/w": np.arange(64, dtype=np.float32) + np.float32(step + add)}, {"samples": step},
                 {"seed": 0})


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "state.safetensors").read_bytes()).hexdigest()


class Recorder(Files):
    """Does everything, and notes each call with the names it was about."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def _note(self, call: str, *paths: Path | str) -> None:
        self.calls.append((call, *(Path(path).name for path in paths)))

    def _of(self, descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def create(self, path: Path) -> int:
        self._note("create", path)
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.calls[-1] != ("write", Path(self._of(descriptor)).name):
            self._note("write", self._of(descriptor))
        return super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._note("fsync", self._of(descriptor))
        super().fsync(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        self._note("replace", source, target)
        super().replace(source, target)

    def fsync_directory(self, path: Path) -> None:
        self._note("fsync_directory", path)
        super().fsync_directory(path)


def test_a_sigkill_at_any_operation_leaves_a_whole_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    signals = json.loads(run_python(KILLER, tmp_path).stdout)
    assert signals == [9] * (len(signals) - 1) + [0]
    whole = {step: sha256(save(tmp_path / "whole", state(step))) for step in (2, 4)}
    found = []
    for fatal in range(len(signals)):
        located = newest_good(tmp_path / str(fatal))
        assert located.state is not None, fatal
        assert located.folder is not None
        assert sha256(located.folder) == whole[located.state.step], fatal
        found.append(located.state.step)
    assert found == sorted(found)  # once the new one is good it stays good, while the old one is removed
    assert (found[0], found[-1]) == (2, 4)
    assert found.count(4) >= 4  # the last sync, the marker and the tree of the old step, and the end
    assert found.count(2) >= 12


def test_each_file_is_synced_under_its_temporary_name_and_the_marker_comes_last(tmp_path: Path) -> None:
    files = Recorder()
    save(tmp_path / "checkpoints", state(4), files)
    folder = "step-00000004"
    assert files.calls == [
        ("fsync_directory", "checkpoints"), ("fsync_directory", tmp_path.name),
        *(call for name in ("state.safetensors", "ready.json") for call in (
            ("create", f"{name}.tmp"), ("write", f"{name}.tmp"), ("fsync", f"{name}.tmp"),
            ("replace", f"{name}.tmp", name), ("fsync_directory", folder)))]


def marker_of_another_run(folder: Path) -> None:
    other = save(folder.parent.parent / "other", state(4, add=0.5))
    (folder / "ready.json").write_bytes((other / "ready.json").read_bytes())


def marker_of_another_step(folder: Path) -> None:
    (folder / "ready.json").write_bytes((step_folder(folder.parent, 2) / "ready.json").read_bytes())


def stale_marker(folder: Path) -> None:
    """The step was saved again with other contents, and the process died before the new marker."""
    other = save(folder.parent.parent / "other", state(4, add=0.5))
    os.replace(other / "state.safetensors", folder / "state.safetensors")


def whole_step_of_another(folder: Path) -> None:
    for name in ("state.safetensors", "ready.json"):
        (folder / name).write_bytes((step_folder(folder.parent, 2) / name).read_bytes())


def marker_that_claims_another_step(folder: Path) -> None:
    marker = json.loads((folder / "ready.json").read_text())
    (folder / "ready.json").write_text(json.dumps(marker | {"step": 6}))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "the marker of another run": (marker_of_another_run, "SHA-256"),
    "the marker of another step": (marker_of_another_step, "SHA-256"),
    "a stale marker": (stale_marker, "SHA-256"),
    "another step's state and marker": (whole_step_of_another, "holds step 2"),
    "a marker that claims another step": (marker_that_claims_another_step, "its marker says 6"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_contents_that_are_not_the_markers_are_passed_over_and_told(tmp_path: Path, kind: str,
                                                                    capfd: pytest.CaptureFixture[str]) -> None:
    damage, reason = DAMAGE[kind]
    save(tmp_path / "checkpoints", state(2))
    damage(save(tmp_path / "checkpoints", state(4)))
    located = resume.starting_point("auto", tmp_path)
    assert located is not None
    assert located.state.step == 2
    assert [skipped.step for skipped in located.passed_over] == [4]
    assert reason in located.passed_over[0].reason
    assert "passed over step 4" in capfd.readouterr().err
    assert step_folder(tmp_path / "checkpoints", 4).is_dir()
