from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxdp.cli import main
from jaxdp.runs import strict_json
from jaxdp.runs.checkpoint import State, save
from jaxdp.tools.difference import first_tensor_difference, record_differences

Capture = pytest.CaptureFixture[str]

IDENTITY = {"model": {"name": "tiny"}, "seed": 0}


def tensors(**changes: np.ndarray) -> dict[str, np.ndarray]:
    return {"parameters/q": np.zeros((2, 3), np.float32), "parameters/v": np.ones(4, ml_dtypes.bfloat16),
            "optimizer/mu": np.zeros(2, np.float32)} | changes


def with_bits(shape: tuple[int, ...], index: tuple[int, ...], word: int) -> np.ndarray:
    words = np.zeros(shape, np.uint32)
    words[index] = word
    return words.view(np.float32)


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step, "rank_losses": [1.0, 2.0], "gradient_digest": f"g{step}",
            "parameter_digest": f"p{step}"} | changes


def make_run(folder: Path, records: list[dict[str, Any]], saved: dict[int, dict[str, np.ndarray]] | None = None,
             identity: dict[str, Any] = IDENTITY) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(strict_json.dumps(entry) + "\n" for entry in records))
    for step, content in (saved or {}).items():
        save(folder / "checkpoints", State(step, content, {"samples": step}, identity))
    return folder


def compare(*paths: Path) -> int:
    return main(["compare", *map(str, paths)])


# Tensors and records


def test_equal_bits_are_the_same_and_so_is_a_nan() -> None:
    nan = {"parameters/q": with_bits((2, 3), (0, 0), 0x7FC00123)}
    assert first_tensor_difference(tensors(**nan), tensors(**nan)) is None


@pytest.mark.parametrize(("left", "right"), [(0x80000000, 0), (0x7FC00000, 0x7FC00001), (1, 0)])
def test_the_first_element_that_differs_is_named_with_both_bit_patterns(left: int, right: int) -> None:
    found = first_tensor_difference(tensors(**{"parameters/q": with_bits((2, 3), (1, 2), left)}),
                                    tensors(**{"parameters/q": with_bits((2, 3), (1, 2), right)}))
    assert found is not None
    assert (found.name, found.index) == ("parameters/q", (1, 2))
    assert f"0x{left:08X}" in found.reason
    assert f"0x{right:08X}" in found.reason


def test_another_shape_dtype_or_name_is_a_difference() -> None:
    for changed in ({"parameters/v": np.ones(5, ml_dtypes.bfloat16)}, {"parameters/v": np.ones(4, np.float16)},
                    {"parameters/w": np.ones(4)}):
        assert first_tensor_difference(tensors(), tensors(**changed)) is not None
        assert first_tensor_difference(tensors(**changed), tensors()) is not None


def test_the_first_rank_whose_loss_differs_is_named_where_worlds_are_alike() -> None:
    assert record_differences(record(1), record(1)) == []
    assert record_differences(record(1), record(1, rank_losses=[1.0])) == []  # another world, the same numbers
    found = record_differences(record(1), record(1, loss=3.0, rank_losses=[1.0, 2.5]))
    assert found == ["loss 1.0 and 3.0", "loss of rank 1 2.0 and 2.5"]


# Runs


def test_equal_runs_exit_0(tmp_path: Path, capfd: Capture) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, [record(1), record(2, loss="NaN")], {2: tensors()})
    assert compare(tmp_path / "a", tmp_path / "b") == 0
    assert capfd.readouterr().out == "the same over steps 1 to 2\n"


def test_the_first_step_and_then_the_first_parameter_are_named(tmp_path: Path, capfd: Capture) -> None:
    a = make_run(tmp_path / "a", [record(step) for step in (1, 2, 3, 4)], {2: tensors(), 4: tensors()})
    changed = {"parameters/v": np.array([1, 1, 2, 1], ml_dtypes.bfloat16)}
    b = make_run(tmp_path / "b", [record(1), record(2), record(3, parameter_digest="x"), record(4, loss=9.0)],
                 {2: tensors(), 4: tensors(**changed)})
    assert compare(a, b) == 1
    assert capfd.readouterr().out.splitlines() == [
        "step 3 is the first that differs: parameter_digest p3 and x",
        "after step 4, parameters/v at [2] differs: 1 of 4 elements, the first 0x3F80 (1.0) and 0x4000 (2.0)"]


def test_runs_whose_records_agree_but_whose_moments_do_not_are_different(tmp_path: Path, capfd: Capture) -> None:
    a = make_run(tmp_path / "a", [record(1)], {1: tensors()})
    b = make_run(tmp_path / "b", [record(1)], {1: tensors(**{"optimizer/mu": np.ones(2, np.float32)})})
    assert compare(a, b) == 1
    assert "optimizer/mu at [0]" in capfd.readouterr().out


def test_a_run_that_goes_on_longer_is_the_same_as_far_as_both_go(tmp_path: Path, capfd: Capture) -> None:
    a = make_run(tmp_path / "a", [record(1)])
    b = make_run(tmp_path / "b", [record(1), record(2)])
    assert compare(a, b) == 0
    assert capfd.readouterr().out.splitlines() == ["the same over steps 1 to 1", f"{b} goes on to step 2"]


# Checkpoints


def test_checkpoints_are_compared_by_tensors_and_a_run_by_its_checkpoint_of_that_step(tmp_path: Path,
                                                                                       capfd: Capture) -> None:
    a = make_run(tmp_path / "a", [record(1)], {1: tensors(), 2: tensors()})
    b = make_run(tmp_path / "b", [record(1)], {1: tensors()}, IDENTITY | {"seed": 1})
    one, other = (path / "checkpoints" / "step-00000001" for path in (a, b))
    assert compare(one, other) == 0
    assert capfd.readouterr().out.splitlines() == ["the same state after step 1: 3 tensors",
                                                   "note: trained with different seed"]
    assert compare(a, other) == 0
    assert compare(other / "state.safetensors", a) == 0
    assert compare(one, a / "checkpoints" / "step-00000002") == 1
    assert "step 1 and 2" in capfd.readouterr().out


@pytest.mark.parametrize("kind", ["absent", "no step in common", "no such step", "damaged"])
def test_what_cannot_be_compared_is_bad_use(tmp_path: Path, capfd: Capture, kind: str) -> None:
    a = make_run(tmp_path / "a", [record(1)], {1: tensors()})
    b = make_run(tmp_path / "b", [record(2)], {2: tensors()})
    (b / "checkpoints" / "step-00000002" / "state.safetensors").write_bytes(b"")
    paths = {"absent": (a, tmp_path / "c"), "no step in common": (a, b),
             "no such step": (b, a / "checkpoints" / "step-00000001"),
             "damaged": (a / "checkpoints" / "step-00000001", b / "checkpoints" / "step-00000002")}[kind]
    assert compare(*paths) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
