from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from helpers import assert_bits_equal

from jaxdp import digest, leaves
from jaxdp.errors import CheckpointError
from jaxdp.runs import checkpoint
from jaxdp.runs.checkpoint import State, load, newest_good, retain, save
from jaxdp.runs.files import Files
from jaxdp.runs.layout import list_steps, step_folder

IDENTITY = {"model": {"name": "Übung 'q'"}, "seed": 0, "shards": None}


def pattern(dtype: Any, *words: int) -> np.ndarray:
    return np.array(words, np.dtype(f"u{np.dtype(dtype).itemsize}")).view(dtype)


def tensors() -> dict[str, np.ndarray]:
    return {
        "parameters/w": pattern(np.float32, 0x80000000, 0x00000001, 0x7FC00123, 0xFF800000, 0x3F800008).reshape(5, 1),
        "parameters/a~1b": pattern(ml_dtypes.bfloat16, 0x7FC1, 0x8000, 0x0001),
        "parameters/a/b": pattern(np.float16, 0x7E01, 0x8000, 0x0001),
        "parameters/层/0": np.array(-0.0, np.float32),
        "parameters/层/2": np.zeros((0, 3), np.float32),
        "parameters/层/10": np.ones((1,), ml_dtypes.bfloat16),
        "optimizer/count": np.array(7, np.int32),
        "optimizer/mask": np.array([True, False]),
    }


def state(step: int, **changes: Any) -> State:
    values = {"tensors": tensors(), "cursor": {"sequence": 8 * step}, "identity": IDENTITY} | changes
    return State(step=step, **values)


class Killed(BaseException):
    """The process is gone: nothing after it touches the disk."""


class DiesAt(Files):
    """Stops the process at the `fatal`-th call; a write dies with half its bytes down."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.calls: list[str] = []
        self.dead = False

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if self.dead or len(self.calls) > self.fatal:
            self.dead = True
            raise Killed

    def create(self, path: Path) -> int:
        self._step("create")
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        if len(self.calls) == self.fatal:
            super().write(descriptor, data[:data.nbytes // 2])
        self._step("write")
        return super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._step("fsync")
        super().fsync(descriptor)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        if not self.dead:
            self._step("close")

    def replace(self, source: Path, target: Path) -> None:
        self._step("replace")
        super().replace(source, target)

    def fsync_directory(self, path: Path) -> None:
        self._step("fsync_directory")
        super().fsync_directory(path)

    def unlink(self, path: Path) -> None:
        if not self.dead:
            super().unlink(path)

    def make_directory(self, path: Path) -> None:
        self._step("make_directory")
        super().make_directory(path)


def calls_of_a_save(folder: Path) -> list[str]:
    files = DiesAt(10_000)
    save(folder, state(1), files)
    return files.calls


def test_every_tensor_comes_back_with_its_bits_dtype_shape_and_name(tmp_path: Path) -> None:
    folder = save(tmp_path, state(3))
    loaded = load(folder)
    assert loaded.step == 3
    assert loaded.cursor == {"sequence": 24}
    assert loaded.identity == IDENTITY
    assert set(loaded.tensors) == set(tensors())
    for name, tensor in tensors().items():
        assert_bits_equal(loaded.tensors[name], tensor, name)


def test_keys_that_look_alike_keep_their_own_tensors(tmp_path: Path) -> None:
    one, two, three, four, five, six = (np.full(1, value, np.float32) for value in range(1, 7))
    tree = {"a/b": one, "a": {"b": two}, "n": {0: three, 2: four, 10: five}, "t": {"0": six}}
    names = leaves.leaf_names(tree)
    save(tmp_path, state(1, tensors=dict(zip(names, (two, one, three, four, five, six), strict=True))))
    loaded = load(step_folder(tmp_path, 1)).tensors
    assert [float(loaded[name][0]) for name in names] == [2, 1, 3, 4, 5, 6]
    assert len(set(names)) == 6


def test_the_bytes_are_a_function_of_the_state_alone(tmp_path: Path) -> None:
    first = save(tmp_path / "a", state(2)) / "state.safetensors"
    second = save(tmp_path / "elsewhere", state(2, identity=dict(reversed(IDENTITY.items())))) / "state.safetensors"
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != b"".join(checkpoint.encode(state(2, cursor={"sequence": 17})))


def test_any_safetensors_reader_reads_the_file(tmp_path: Path) -> None:
    data = (save(tmp_path, state(1)) / "state.safetensors").read_bytes()
    read = dict(safetensors.deserialize(data))
    for name, tensor in tensors().items():
        assert tuple(read[name]["shape"]) == tensor.shape
        assert bytes(read[name]["data"]) == tensor.tobytes()


def test_the_marker_has_the_digest_that_a_device_computes(tmp_path: Path) -> None:
    parameters = {"w": np.arange(6, dtype=np.float32), "v": {"b": np.ones((2, 2), np.float32)}}
    named = dict(zip(leaves.leaf_names(parameters), (parameters["v"]["b"], parameters["w"]), strict=True))
    folder = save(tmp_path, state(1, tensors={f"parameters/{name}": leaf for name, leaf in named.items()}))
    on_device = {"w": jnp.asarray(parameters["w"]), "v": {"b": jnp.asarray(parameters["v"]["b"])}}
    assert json.loads((folder / "ready.json").read_text())["digest"] == digest.tree_digest(on_device)


def test_a_save_syncs_the_file_before_its_name_and_the_state_before_its_marker(tmp_path: Path) -> None:
    calls = calls_of_a_save(tmp_path)
    assert calls[:3] == ["make_directory", "fsync_directory", "fsync_directory"]
    rest = [name for index, name in enumerate(calls[3:], 3) if not (name == "write" and calls[index - 1] == "write")]
    one_file = ["create", "write", "fsync", "close", "replace", "fsync_directory"]
    assert rest == 2 * one_file


def test_a_stop_at_any_call_of_a_save_leaves_the_older_step_or_the_whole_new_one(tmp_path: Path) -> None:
    total = len(calls_of_a_save(tmp_path / "count"))
    for fatal in range(total):
        folder = tmp_path / str(fatal)
        save(folder, state(2))
        with pytest.raises(Killed):
            save(folder, state(4), DiesAt(fatal))
        found = newest_good(folder)
        assert found.state is not None
        # The very last call syncs the folder after the marker's rename: then step 4 may be whole.
        assert found.state.step == (4 if fatal == total - 1 else 2), fatal
        save(folder, state(4))  # leftovers are not in the way
        again = newest_good(folder).state
        assert again is not None
        assert again.step == 4
        assert sorted(path.name for path in step_folder(folder, 4).iterdir()) == ["ready.json", "state.safetensors"]


def test_a_stop_before_the_first_save_ever_finds_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        save(tmp_path, state(2), DiesAt(6))
    found = newest_good(tmp_path)
    assert found.state is None
    assert [(skipped.step, "did not finish" in skipped.reason) for skipped in found.passed_over] == [(2, True)]
    assert list_steps(tmp_path) != []  # never deleted as junk


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "state.safetensors").write_bytes(data)


def zeros_of_the_right_size(folder: Path) -> None:
    size = (folder / "state.safetensors").stat().st_size
    (folder / "state.safetensors").write_bytes(bytes(size))


def half_a_marker(folder: Path) -> None:
    text = (folder / "ready.json").read_text()
    (folder / "ready.json").write_text(text[:len(text) // 2])


def marker_of_another_digest(folder: Path) -> None:
    marker = json.loads((folder / "ready.json").read_text())
    (folder / "ready.json").write_text(json.dumps(marker | {"digest": "0" * 64}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip_a_bit, "SHA-256"),
    "zeros of the right size": (zeros_of_the_right_size, "SHA-256"),
    "a short file": (lambda folder: os.truncate(folder / "state.safetensors", 100), "100 bytes"),
    "no state": (lambda folder: (folder / "state.safetensors").unlink(), "cannot be read"),
    "no marker": (lambda folder: (folder / "ready.json").unlink(), "did not finish"),
    "half a marker": (half_a_marker, "ready.json"),
    "an empty marker": (lambda folder: (folder / "ready.json").write_text(""), "ready.json"),
    "another digest": (marker_of_another_digest, "parameter digest"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_step_is_passed_over_by_name_and_kept(tmp_path: Path, kind: str) -> None:
    damage, reason = DAMAGE[kind]
    save(tmp_path, state(2))
    damage(save(tmp_path, state(4)))
    found = newest_good(tmp_path)
    assert found.state is not None
    assert found.state.step == 2
    assert [skipped.step for skipped in found.passed_over] == [4]
    assert reason in found.passed_over[0].reason
    assert step_folder(tmp_path, 4).is_dir()


def test_a_step_under_another_steps_name_is_not_loaded(tmp_path: Path) -> None:
    save(tmp_path, state(2)).rename(step_folder(tmp_path, 9))
    with pytest.raises(CheckpointError, match="holds step 2"):
        load(step_folder(tmp_path, 9))


class FullDisk(Files):
    """Has no room from the `fatal`-th write on."""

    def __init__(self, fatal: int = 1) -> None:
        self.left = fatal

    def write(self, descriptor: int, data: memoryview) -> int:
        self.left -= 1
        if self.left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data)

    def free_bytes(self, path: Path) -> int:
        assert path.exists()
        return 4096


@pytest.mark.parametrize("fatal", [1, 3, 9])  # the first byte, mid-file, the marker
def test_a_full_disk_is_told_with_path_needed_and_free_bytes_and_leaves_no_trace(tmp_path: Path, fatal: int) -> None:
    save(tmp_path, state(2))
    before = (step_folder(tmp_path, 2) / "state.safetensors").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, state(4), FullDisk(fatal))
    needed = len(b"".join(checkpoint.encode(state(4))))
    for text in (str(step_folder(tmp_path, 4)), f"needs {needed} bytes", "4096 are free", "No space left"):
        assert text in str(caught.value)
    assert [step for step, _ in list_steps(tmp_path)] == [2]
    assert (step_folder(tmp_path, 2) / "state.safetensors").read_bytes() == before
    save(tmp_path, state(6))
    found = newest_good(tmp_path)
    assert found.state is not None
    assert found.state.step == 6
    assert found.passed_over == ()


def test_retention_removes_old_finished_steps_only(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, state(step))
    (step_folder(tmp_path, 2) / "ready.json").unlink()
    assert retain(tmp_path, 1) == [step_folder(tmp_path, 4)]
    assert [step for step, _ in list_steps(tmp_path)] == [2, 6]


def test_a_dtype_that_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'parameters/c' has dtype complex64"):
        save(tmp_path, state(1, tensors={"parameters/c": np.zeros(1, np.complex64)}))
