from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT, clean_environment, run_jaxdp

from jaxdp.cli import main
from jaxdp.errors import CheckpointError
from jaxdp.runs import strict_json
from jaxdp.runs.checkpoint import State, load, save
from jaxdp.runs.keeper import Peer
from jaxdp.runs.layout import step_folder
from jaxdp.runs.stop import AnnouncedStop, FollowedStop

Capture = pytest.CaptureFixture[str]

USER_MODEL = '''
import dataclasses
import jax
import jax.numpy as jnp
from jaxdp.models import Model
from jaxdp.models.decoder import decoder_model
from jaxdp.models.presets import DecoderConfig

SMALL = DecoderConfig(vocab_size=256, dim=8, layers=1, heads=2, kv_heads=1, ffn_dim=16, context=8)

def text_model():
    return decoder_model(SMALL, name="user_model:text_model")

def small_loss(params, batch, key):
    """A table of bigrams: all that a run needs, and quick to compile."""
    scores = jax.nn.log_softmax(params["table"])[batch["inputs"], batch["targets"]]
    return -jnp.sum(scores), jnp.float32(batch["targets"].size)

small = Model(name="user_model:small", init=lambda key: {"table": jax.random.normal(key, (8, 8))}, loss=small_loss,
              vocab_size=8, context=4)

def scripted(batch):
    """A loss that is NaN when the batch's first token says 2, +inf when it says 3; its gradient too."""
    first = batch["inputs"][0, 0]
    return jnp.where(first == 2, jnp.nan, jnp.where(first == 3, jnp.inf, 1.0))

def loss(params, batch, key):
    weight = jnp.float32(batch["targets"].size)
    return jnp.sum(params["w"]) * scripted(batch) * weight, weight

nonfinite = Model(name="user_model:nonfinite", init=lambda key: {"w": jnp.ones(3)}, loss=loss, vocab_size=8, context=4)

def explode(params, batch, key):
    raise RuntimeError("the model's own fault\\nwith details")

broken = dataclasses.replace(nonfinite, name="user_model:broken", loss=explode)
'''


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own, with a user's model in it."""
    (tmp_path / "user_model.py").write_text(USER_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("user_model", None)


def train(output: str, *arguments: object, model: str = "user_model:small", devices: int = 2) -> int:
    return main(["train", "--model", model, "--platform", "cpu", "--devices", str(devices), "--batch", "2", "--json",
                 "--output", output, *map(str, arguments)])


def metrics(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text("utf-8").splitlines()]


def read(output: str, name: str) -> dict[str, Any]:
    return json.loads((Path(output) / name).read_text("utf-8"))


def state_bytes(output: str, step: int) -> bytes:
    return (step_folder(Path(output) / "checkpoints", step) / "state.safetensors").read_bytes()


def contents(output: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(output).rglob("*") if path.is_file()}


def start(output: str, *arguments: object) -> subprocess.Popen[str]:
    """A run in a process of its own, once its second step is recorded."""
    words = ["train", "--model", "user_model:small", "--platform", "cpu", "--batch", "2", "--json", "--output", output]
    process = subprocess.Popen([sys.executable, "-c", "import sys; from jaxdp.cli import main; sys.exit(main())",
                                *words, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True, env=clean_environment())
    deadline = time.monotonic() + 90
    while len(strict_json.read_records(Path(output) / "metrics.jsonl")) < 2:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the run did not get to step 2: {process.communicate()[1]}")
        time.sleep(0.05)
    return process


def test_a_run_leaves_a_whole_package_and_one_record_a_step_on_stdout(capfd: Capture) -> None:
    output = 'Übung 数据 1 "quoted" 🌳 '
    assert train(output, "--steps", 3, model="tiny") == 0
    assert capfd.readouterr().out.encode() == (Path(output) / "metrics.jsonl").read_bytes()
    names = {path.name for path in Path(output).iterdir()}
    assert {"manifest.json", "metrics.jsonl", "trace.jsonl", "stderr.txt", "summary.json", "checkpoints"} <= names
    assert [record["step"] for record in metrics(output)] == [1, 2, 3]
    last, summary, manifest = metrics(output)[-1], read(output, "summary.json"), read(output, "manifest.json")
    assert (last["parameter_count"], last["element_count"], last["parameter_check"]) == (12, 728, "ok")
    assert summary["parameter_digest"] == last["parameter_digest"] == summary["checkpoints"][-1]["parameter_digest"]
    assert summary["parameter_checks"] == {"ok": 3, "mismatch": 0, "skipped": 0}
    assert (manifest["status"], manifest["returncode"], summary["status"]) == ("completed", 0, "completed")
    assert manifest["configuration"]["collective"]["reduction_order"] == "balanced_rank_tree"
    assert len(manifest["data_sha256"]) == 64


def test_two_steps_and_three_more_are_five_byte_for_byte(capfd: Capture) -> None:
    options = ("--shards", 2, "--warmup-steps", 4, "--weight-decay", 0.1, "--checkpoint-every", 1)
    assert train("whole", "--steps", 5, *options) == 0
    assert train("parts", "--steps", 2, *options) == 0
    assert train("parts", "--steps", 5, *options, "--resume", "auto", devices=1) == 0
    for step in range(1, 6):
        assert state_bytes("parts", step) == state_bytes("whole", step), step
    assert [record["step"] for record in metrics("parts")] == [1, 2, 3, 4, 5]
    assert [record["learning_rate"] for record in metrics("parts")] == [
        record["learning_rate"] for record in metrics("whole")]
    capfd.readouterr()
    assert main(["compare", "whole", "parts"]) == 0
    assert capfd.readouterr().out == "the same over steps 1 to 5\n"


def test_a_resume_goes_on_with_the_next_samples_and_counts_updates(workplace: Path) -> None:
    for steps in (2, 3, 4):
        assert train("run", "--steps", steps, "--resume", "auto") == 0
    states = [load(step_folder(Path("run/checkpoints"), step)) for step in (2, 3, 4)]
    assert [state.cursor for state in states] == [{"samples": 4 * state.step} for state in states]
    assert [int(state.tensors["updates"]) for state in states] == [2, 3, 4]


def test_a_run_at_its_last_step_does_nothing_and_exits_0(capfd: Capture) -> None:
    assert train("run", "--steps", 2) == 0
    before = contents("run")
    assert train("run", "--steps", 2, "--resume", "auto") == 0
    assert "nothing to do" in capfd.readouterr().err
    assert contents("run") == before


def test_a_run_that_died_between_its_last_save_and_its_summary_is_finished(capfd: Capture) -> None:
    assert train("run", "--steps", 2) == 0
    (Path("run") / "summary.json").unlink()
    manifest = read("run", "manifest.json") | {"status": "running", "returncode": None}
    (Path("run") / "manifest.json").write_text(json.dumps(manifest))
    assert train("run", "--steps", 2, "--resume", "auto") == 0
    assert (read("run", "summary.json")["steps"], read("run", "manifest.json")["status"]) == (2, "completed")


def test_a_damaged_checkpoint_is_passed_over_and_told(capfd: Capture) -> None:
    assert train("run", "--steps", 3, "--checkpoint-every", 1) == 0
    whole = state_bytes("run", 3)
    (step_folder(Path("run/checkpoints"), 3) / "state.safetensors").write_bytes(b"torn")
    assert train("run", "--steps", 3, "--resume", "auto") == 0
    assert "passed over step 3" in capfd.readouterr().err
    resumed_from = read("run", "manifest.json")["configuration"]["resumed_from"]
    assert [entry["step"] for entry in resumed_from["passed_over"]] == [3]
    assert state_bytes("run", 3) == whole
    assert [record["step"] for record in metrics("run")] == [1, 2, 3]


def test_a_resume_that_would_change_the_numbers_is_refused_by_name(capfd: Capture) -> None:
    assert train("run", "--steps", 1) == 0
    before = contents("run")
    for arguments, named in (
        (("--seed", 1), ["seed (checkpoint: 0, now: 1)"]),
        (("--learning-rate", 0.5), ["optimizer.learning_rate (checkpoint: 0.001, now: 0.5)"]),
        (("--shards", 2), ["shards (checkpoint: None, now: 2)"]),
        (("--data", "ramp"), ["data.kind (checkpoint: 'synthetic', now: 'ramp')"]),
        (("--batch", 4, "--context", 2), ["data.context (checkpoint: 4, now: 2)", "data.sequences"]),
        (("--model", "user_model:nonfinite"), ["model.name (checkpoint: 'user_model:small'"]),
    ):
        capfd.readouterr()
        assert train("run", "--steps", 2, "--resume", "auto", *arguments) == 2, arguments
        err = capfd.readouterr().err
        assert [text for text in named if text not in err] == []
    assert contents("run") == before


def test_a_path_branches_into_a_new_folder_but_never_mixes_two_runs(capfd: Capture) -> None:
    assert train("run", "--steps", 3, "--checkpoint-every", 1) == 0
    checkpoint = "run/checkpoints/step-00000002"
    assert train("branch", "--steps", 3, "--resume", checkpoint) == 0
    assert [record["step"] for record in metrics("branch")] == [3]
    assert state_bytes("branch", 3) == state_bytes("run", 3)
    capfd.readouterr()
    assert train("run", "--steps", 9, "--resume", checkpoint) == 2
    assert "Choose another --output" in capfd.readouterr().err


def test_only_the_newest_checkpoints_are_kept_when_asked() -> None:
    assert train("run", "--steps", 4, "--checkpoint-every", 1, "--keep-checkpoints", 2) == 0
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_by_name(capfd: Capture) -> None:
    Path("run").mkdir()
    (Path("run") / "checkpoints").write_text("in the way")
    assert train("run", "--steps", 4, "--checkpoint-every", 2) == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert all(text in err for text in ("step 2", "run/checkpoints/step-00000002", "needs", "are free"))
    assert (read("run", "manifest.json")["status"], read("run", "manifest.json")["returncode"]) == ("failed", 1)
    assert [record["step"] for record in metrics("run")] == [1, 2]


def nonfinite_tokens() -> str:
    """Eight windows of one token each; `nonfinite` has a loss that is NaN at token 2 and infinite at token 3."""
    tokens = np.repeat(np.arange(8, dtype="<u2"), 4)
    Path("tokens.bin").write_bytes(tokens.tobytes())
    return "tokens.bin"


def test_a_non_finite_loss_spoils_only_its_own_step() -> None:
    options = ("--data", nonfinite_tokens(), "--on-nonfinite", "skip", "--validation-fraction", 0)
    assert train("run", "--steps", 8, "--batch", 1, *options, model="user_model:nonfinite", devices=1) == 0
    records = metrics("run")
    skipped = [record for record in records if record["update"] == "skipped"]
    assert sorted(map(str, (record["loss"] for record in skipped))) == ["Infinity", "NaN"]
    assert all(isinstance(record["loss"], float) for record in records if record not in skipped)
    assert "NaN" not in str(read("run", "summary.json")["tokens_per_s"])


def test_a_non_finite_gradient_stops_the_run_with_its_step_on_record(capfd: Capture) -> None:
    options = ("--data", nonfinite_tokens(), "--validation-fraction", 0)
    assert train("run", "--steps", 8, "--batch", 1, *options, model="user_model:nonfinite", devices=1) == 1
    last = metrics("run")[-1]
    assert (last["update"], last["loss"] in ("NaN", "Infinity")) == ("skipped", True)
    assert f"step {last['step']}: the reduced gradient is not finite" in capfd.readouterr().err
    assert read("run", "summary.json")["status"] == "failed"


def test_an_unexpected_error_is_its_cause_first_with_the_traceback_kept(workplace: Path) -> None:
    done = run_jaxdp("train", "--model", "user_model:broken", "--platform", "cpu", "--steps", 1, "--output",
                     "Übung 数据 ", cwd=workplace, check=False, LC_ALL="C", PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "jaxdp train: RuntimeError: the model's own fault"
    assert "in explode" in done.stderr
    assert (workplace / "Übung 数据 " / "stderr.txt").read_text("utf-8") == done.stderr
    assert "Übung 数据 " in read("Übung 数据 ", "manifest.json")["command"]


def test_validation_loss_is_the_same_at_every_world_size() -> None:
    losses = []
    for devices in (1, 4):
        assert train(f"run{devices}", "--steps", 2, "--shards", 4, "--eval-every", 2, "--eval-sequences", 5,
                     devices=devices) == 0
        losses.append([record["validation_loss"] for record in metrics(f"run{devices}")])
    assert losses[0] == losses[1]
    assert losses[0][0] is None
    assert isinstance(losses[0][1], float)


def test_a_byte_level_model_gives_a_sample_and_the_same_again_from_its_checkpoint(capfd: Capture) -> None:
    Path("corpus.txt").write_text("in the beginning was the word. " * 40)
    words = ["train", "--model", "user_model:text_model", "--data", "corpus.txt", "--platform", "cpu", "--batch", "2",
             "--steps", "2", "--sample", "--output", "run"]
    assert main(words) == 0
    out = capfd.readouterr().out
    text = (Path("run") / "sample.txt").read_bytes()
    assert len(text) == 300
    assert f"sample:\n{text.decode('utf-8', 'replace')}\n" in out
    assert out.count("step 1/2") == out.count("step 2/2") == 1
    assert "run package: run" in out
    assert (Path("run") / "loss.png").read_bytes()[:4] == b"\x89PNG" or "matplotlib is not installed" in out
    assert main(["sample", "run"]) == 0
    assert capfd.readouterr().out == "" + text.decode("utf-8", "replace") + "\n"
    assert main(["sample", "run/checkpoints/step-00000002", "--prompt", "in", "--length", "5"]) == 0
    assert capfd.readouterr().out.startswith("in")


def test_sigterm_ends_in_a_good_checkpoint_and_the_folder_is_refused_until_then(capfd: Capture) -> None:
    process = start("run", "--steps", 1_000_000)
    try:
        assert main(["train", "--model", "tiny", "--platform", "cpu", "--output", "run", "--resume", "auto"]) == 2
        assert f"process {process.pid} on " in capfd.readouterr().err
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, err
    last = metrics("run")[-1]["step"]
    assert load(step_folder(Path("run/checkpoints"), last)).step == last
    assert (read("run", "manifest.json")["status"], read("run", "manifest.json")["returncode"]) == ("interrupted", 143)
    assert f"stopped by SIGTERM after step {last}" in err
    assert train("run", "--steps", last + 1, "--resume", "auto", devices=1) == 0
    assert metrics("run")[-1]["step"] == last + 1


def test_a_killed_run_goes_on_in_the_same_bits(capfd: Capture) -> None:
    process = start("run", "--steps", 1_000_000, "--checkpoint-every", 1, "--shards", 2, "--keep-checkpoints", 3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    last = metrics("run")[-1]["step"]
    assert train("run", "--steps", last + 2, "--shards", 2, "--resume", "auto") == 0
    assert "took over run from a run that died" in capfd.readouterr().err
    assert [record["step"] for record in metrics("run")] == list(range(1, last + 3))
    assert train("whole", "--steps", last + 2, "--shards", 2) == 0
    assert state_bytes("run", last + 2) == state_bytes("whole", last + 2)


# One rank of several


def test_all_ranks_end_with_the_same_step_however_their_signals_came(tmp_path: Path) -> None:
    first, peer = AnnouncedStop(tmp_path), FollowedStop(tmp_path)
    with first, peer:  # entered last, the peer's handler is the one that a signal to this process reaches
        os.kill(os.getpid(), signal.SIGTERM)
        assert not peer.is_due(1)  # rank 0 has said nothing yet
        first.signal_number = signal.SIGTERM
        assert [first.is_due(step) for step in (1, 2)] == [False, True]
        assert [peer.is_due(step) for step in (1, 2)] == [False, True]
    assert (first.exit_code, peer.exit_code) == (143, 143)
    AnnouncedStop(tmp_path)  # a new start: the old announcement does not count
    assert not FollowedStop(tmp_path).is_due(5)


def test_a_peer_leaves_a_checkpoint_step_only_once_the_marker_is_down(tmp_path: Path) -> None:
    peer = Peer(tmp_path, rank=3, timeout_s=0.1)
    state = State(7, {"parameters/w": np.ones(2, np.float32)}, {"samples": 7}, {})
    step_folder(tmp_path, 7).mkdir()
    (step_folder(tmp_path, 7) / "state.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"rank 3 waited 0\.1 s for rank 0 to save .*step-00000007"):
        peer.save(7, lambda: state)
    save(tmp_path, state)
    peer.save(7, lambda: state)


@pytest.mark.parametrize(("ranks", "arguments", "words"), [
    ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, (), ["RANK", "'2'"]),
    ({"RANK": "1"}, (), ["WORLD_SIZE"]),
    ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, ("--devices", "2"), ["--devices", "got 2"]),
    ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (), ["--output"]),
])
def test_a_process_that_is_one_of_several_never_trains_alone(ranks: dict[str, str], arguments: tuple[str, ...],
                                                             words: list[str], capfd: Capture,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--model", "tiny", "--platform", "cpu", *arguments]) == 2
    err = capfd.readouterr().err
    assert [word for word in words if word not in err] == []
    assert not Path("runs").exists()
