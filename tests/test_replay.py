from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdp.cli import main
from jaxdp.errors import BadUse
from jaxdp.runs import checkpoint, strict_json
from jaxdp.runs.checkpoint import State
from jaxdp.tools import replay

Capture = pytest.CaptureFixture[str]


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step, "rank_losses": [1.0], "gradient_digest": f"g{step}",
            "parameter_digest": f"p{step}"} | changes


def write_manifest(path: Path, resumed_from: int | None = None, **configuration: Any) -> None:
    content = {"identity": {}, "shards": None, "world_size": 2, "platform": "cpu", "ranked": False,
               "resumed_from": None if resumed_from is None else {"step": resumed_from}} | configuration
    path.write_text(json.dumps({"configuration": content}))


def fake_run(folder: Path, steps: int = 6, saved: tuple[int, ...] = (), **configuration: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in range(1, steps + 1)))
    write_manifest(folder / "manifest.json", **configuration)
    for step in saved:
        checkpoint.save(folder / "checkpoints", State(step, {"parameters/w": np.zeros(1, np.float32)}, {}, {}))
    return folder


# Which start of the run did a step, and from where it is done again


def test_a_step_belongs_to_the_last_start_before_it(tmp_path: Path) -> None:
    run = fake_run(tmp_path, resumed_from=4, world_size=8)
    write_manifest(run / "manifest-1.json", world_size=1)
    write_manifest(run / "manifest-2.json", resumed_from=2, world_size=4)
    assert [replay.session_of(run, step).configuration["world_size"] for step in (1, 2, 3, 4, 5, 6)] == [
        1, 1, 4, 4, 8, 8]


def test_it_starts_from_the_nearest_earlier_good_checkpoint(tmp_path: Path, capfd: Capture) -> None:
    run = fake_run(tmp_path, saved=(2, 4))
    session = replay.session_of(run, 5)
    starts = {step: replay._start(run, step, session) for step in (2, 3, 5)}
    assert {step: state and state.step for step, state in starts.items()} == {2: None, 3: 2, 5: 4}
    (run / "checkpoints" / "step-00000004" / "state.safetensors").write_bytes(b"")
    damaged = replay._start(run, 5, session)
    assert damaged is not None
    assert damaged.step == 2
    assert "passed over step 4" in capfd.readouterr().err


def test_without_shards_it_does_not_go_back_beyond_a_resume(tmp_path: Path) -> None:
    run = fake_run(tmp_path, saved=(2,), resumed_from=4)
    with pytest.raises(BadUse, match="no good checkpoint from step 4"):
        replay._start(run, 6, replay.session_of(run, 6))
    write_manifest(run / "manifest.json", resumed_from=4, shards=8)
    state = replay._start(run, 6, replay.session_of(run, 6))
    assert state is not None
    assert state.step == 2


def test_the_first_step_and_field_that_differ_are_named() -> None:
    recorded = {step: record(step) for step in (1, 2, 3)}
    again = [record(2), record(3)]
    assert replay.first_difference(recorded, again) is None
    again[1]["parameter_digest"] = "x"
    assert replay.first_difference(recorded, again) == "step 3: parameter_digest p3 and x"
    again[0] |= {"loss": 7.0, "gradient_digest": "y"}
    found = replay.first_difference(recorded, again)
    assert found is not None
    assert found.startswith("step 2: loss 0.5 and 7.0")


@pytest.mark.parametrize(("arguments", "named"), [
    (["--step", "9"], "--step must be a step that"), ([], "--step must be given"), (["--step", "0"], "--step"),
    (["--step", "2", "--devices", "4"], "--devices must be 2"), (["--step", "2", "--devices", "3"], "--devices")])
def test_bad_use_is_refused_with_the_flag(arguments: list[str], named: str, tmp_path: Path, capfd: Capture) -> None:
    assert main(["replay", str(fake_run(tmp_path)), *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert named in err


def test_a_folder_without_a_run_is_bad_use(tmp_path: Path, capfd: Capture) -> None:
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "no record of a step" in capfd.readouterr().err


# A real run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    assert main(["train", "--model", "tiny", "--platform", "cpu", "--devices", "2", "--shards", "2", "--steps", "3",
                 "--checkpoint-every", "2", "--batch", "1", "--output", str(folder), "--json"]) == 0
    return folder


def test_a_step_has_the_same_bits_again_at_another_world_size_and_leaves_the_run_alone(run: Path,
                                                                                        capfd: Capture) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capfd.readouterr()
    assert main(["replay", str(run), "--step", "3", "--devices", "1", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found == {"step": 3, "same": True, "difference": None, "from_step": 2, "world": 1}
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_checkpoint_one_ulp_off_is_found(run: Path, capfd: Capture) -> None:
    good = checkpoint.load(run / "checkpoints" / "step-00000002")
    tensors = {name: tensor.copy() for name, tensor in good.tensors.items()}
    weight = tensors["parameters/output_head"]
    weight.flat[0] = np.nextafter(weight.flat[0], np.float32(np.inf))
    checkpoint.save(run / "checkpoints", State(good.step, tensors, good.cursor, good.identity))
    try:
        capfd.readouterr()
        assert main(["replay", str(run), "--step", "3"]) == 1
        assert capfd.readouterr().out.startswith("step 3: ")
    finally:
        checkpoint.save(run / "checkpoints", good)


def test_a_run_whose_model_is_another_now_is_refused_by_name(run: Path, tmp_path: Path, capfd: Capture) -> None:
    for name in ("manifest.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    manifest = strict_json.loads((tmp_path / "manifest.json").read_bytes())
    manifest["configuration"]["identity"]["data"]["sha256"] = "0" * 64
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "data.sha256" in capfd.readouterr().err
