from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers import run_python

from jaxdp import __version__
from jaxdp.cli import COMMANDS, main
from jaxdp.config import AdamWConfig, DataParallelConfig
from jaxdp.errors import BadUse, ConfigError
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.flags import parse

Capture = pytest.CaptureFixture[str]

TRAIN = ["train", "--model", "tiny", "--platform", "cpu", "--steps", "1", "--devices", "2", "--json"]

REFUSED = {  # arguments, and what the one sentence on stderr must name
    "bucket 0": (["--bucket-bytes", "0"], ["--bucket-bytes", "at least 1", "got 0"]),
    "bucket True": (["--bucket-bytes", "True"], ["--bucket-bytes", "an integer", "'True'"]),
    "bucket 2.5": (["--bucket-bytes", "2.5"], ["--bucket-bytes", "an integer", "'2.5'"]),
    "bucket nothing": (["--bucket-bytes"], ["--bucket-bytes", "expected one argument"]),
    "devices 3": (["--devices", "3"], ["--devices", "1, 2, 4 or 8", "got 3"]),
    "shards 3": (["--shards", "3"], ["--shards", "power of two", "got 3"]),
    "fewer shards than devices": (["--shards", "1"], ["--shards", "world size (2)", "got 1"]),
    "shards without the tree": (["--shards", "2", "--reducer", "psum"], ["--reducer", "'tree'", "'psum'"]),
    "model": (["--model", "nosuch"], ["--model", "tiny", "'nosuch'"]),
    "platform": (["--platform", "tpu"], ["--platform", "auto, cpu, rocm, cuda", "'tpu'"]),
    "interval": (["--parameter-check-interval", "-1"], ["--parameter-check-interval", "at least 0", "got -1"]),
    "steps": (["--steps", "-5"], ["--steps", "at least 1", "got -5"]),
    "data": (["--data", "absent.txt"], ["--data", "absent.txt", "synthetic"]),
    "output": (["--output", "/proc/x"], ["--output", "/proc/x"]),
    "negative rate": (["--learning-rate", "-1e-3"], ["--learning-rate", "above 0", "-0.001"]),
    "no number": (["--learning-rate", "nan"], ["--learning-rate", "finite", "nan"]),
    "timeout 0": (["--timeout", "0"], ["--timeout", "above 0"]),
    "context": (["--context", "5"], ["--context", "at most 4", "got 5"]),
    "accumulation": (["--batch", "8", "--accumulation-steps", "3"], ["--accumulation-steps", "divisor of batch (8)"]),
    "misspelt": (["--buket-bytes", "3"], ["--buket-bytes", "--bucket-bytes"]),
    "abbreviated": (["--step", "3"], ["--step"]),
    "a word too many": (["--json", "perhaps"], ["'perhaps'"]),
    "sample of no text": (["--sample"], ["--sample", "tiny"]),
    "auto without a folder": (["--resume", "auto"], ["--resume", "--output"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_use_is_one_sentence_that_names_flag_and_value_and_exit_2(case: str, tmp_path: Path, capfd: Capture,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, words = REFUSED[case]
    output = [] if "--output" in arguments or case == "auto without a folder" else ["--output", "run"]
    assert main([*TRAIN, *output, *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert [word for word in words if word not in err] == []


def test_help_of_every_command_needs_neither_jax_nor_numpy() -> None:
    code = """
import sys
from jaxdp.cli import COMMANDS, main
for words in ([], *([name] for name in COMMANDS)):
    assert main([*words, "--help"]) == 0
assert main(["trace", "export", "--help"]) == 0
print({"jax", "numpy", "rich", "flax"} & set(sys.modules))
"""
    done = run_python(code)
    assert done.stdout.splitlines()[-1] == "set()"
    assert all(name in done.stdout for name in COMMANDS)


def test_the_train_module_leaves_the_choice_of_a_platform_open() -> None:
    assert run_python("import sys, jaxdp.runs.train; print('jax' in sys.modules)").stdout == "False\n"


@pytest.mark.parametrize(("platform", "asked", "before", "after"), [
    ("cpu", 4, "", ("cpu", "--xla_force_host_platform_device_count=4")),
    ("auto", 2, "--xla_dump_to=/x", (None, "--xla_dump_to=/x --xla_force_host_platform_device_count=2")),
    ("cpu", 2, "--xla_force_host_platform_device_count=8", ("cpu", "--xla_force_host_platform_device_count=8")),
    ("rocm", 2, "--xla_dump_to=/x", ("rocm", "--xla_dump_to=/x")),
])
def test_choosing_a_platform_keeps_the_users_flags(platform: Any, asked: int, before: str, after: tuple[str, str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from jaxdp.runs.platform import select

    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("XLA_FLAGS", before)
    select(platform, asked)
    found = (os.environ.get("JAX_PLATFORMS"), os.environ["XLA_FLAGS"])
    os.environ.pop("JAX_PLATFORMS", None)
    assert found == after


@pytest.mark.parametrize(("words", "value"), [
    ([], False), (["--json"], True), (["--no-json"], False), (["--json", "False"], False), (["--json=false"], False),
    (["--json", "True"], True), (["--json", "--no-json"], False),
])
def test_a_boolean_flag_that_says_false_is_false(words: list[str], value: bool) -> None:
    assert parse(TrainConfig, "jaxdp train", words).json is value


def test_every_setting_of_the_trainer_and_the_optimizer_has_a_flag_that_reaches_it() -> None:
    other = {"devices": 2, "bucket_bytes": 4096, "reducer": "psum", "uneven_inputs": "token-weighted",
             "parameter_check_interval": 7, "step_mode": "staged", "persistent_gradient_buckets": True,
             "gradient_bucket_views": True, "overlap_gradient_communication": True,
             "record_gradient_ready_order": True, "accumulation_steps": 2, "maximum_gradient_norm": 1.0,
             "compute_dtype": "bfloat16", "on_nonfinite": "skip", "timeout": 5.0, "learning_rate": 0.5,
             "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "warmup_steps": 3, "decay_steps": 9,
             "minimum_learning_rate": 0.1}
    words = [word for name, value in other.items()
             for word in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))]
    changed = parse(TrainConfig, "jaxdp train", words).data_parallel()
    default = TrainConfig().data_parallel()
    same = [field.name for field in dataclasses.fields(DataParallelConfig)
            if getattr(changed, field.name) == getattr(default, field.name)]
    assert same == ["shards"]
    assert parse(TrainConfig, "jaxdp train", ["--shards", "8"]).data_parallel().shards == 8
    left = [field.name for field in dataclasses.fields(AdamWConfig)
            if getattr(changed.optimizer, field.name) == getattr(default.optimizer, field.name)]
    assert left == ["epsilon"]


def test_the_same_refusal_names_the_field_in_python_and_the_flag_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"^bucket_bytes must be"):
        TrainConfig(bucket_bytes=0)
    with pytest.raises(ConfigError, match=r"^--bucket-bytes must be"):
        parse(TrainConfig, "jaxdp train", ["--bucket-bytes", "0"])


def test_an_unknown_command_names_the_known_ones(capfd: Capture) -> None:
    assert main(["trian"]) == 2
    err = capfd.readouterr().err
    assert "'trian'" in err
    assert all(name in err for name in COMMANDS)


def test_no_command_at_all_is_bad_use_with_the_overview(capfd: Capture) -> None:
    assert main([]) == 2
    assert "commands:" in capfd.readouterr().err


def test_the_version_is_told(capfd: Capture) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"jaxdp {__version__}\n"


def test_an_unexpected_error_is_its_cause_first_and_then_its_traceback(capfd: Capture,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: Any) -> int:
        raise RuntimeError("the cause\nand more")

    monkeypatch.setitem(COMMANDS, "doctor", dataclasses.replace(COMMANDS["doctor"], run=broken))
    assert main(["doctor"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "jaxdp doctor: RuntimeError: the cause"
    assert lines[1].startswith("Traceback")


def test_a_positional_argument_that_is_missing_is_named() -> None:
    from jaxdp.tools.options import CompareOptions

    with pytest.raises(BadUse, match="required: B"):
        parse(CompareOptions, "jaxdp compare", ["one"])
