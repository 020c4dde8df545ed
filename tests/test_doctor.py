from __future__ import annotations

import json
import os

import pytest

from jaxdp.cli import main
from jaxdp.tools import doctor

Capture = pytest.CaptureFixture[str]


def test_a_machine_is_shown_section_by_section(capfd: Capture) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capfd.readouterr().out)
    assert list(findings["devices"]) == [str(index) for index in range(8)]
    assert {entry["platform"] for entry in findings["devices"].values()} == {"cpu"}
    assert "cpu" in findings["native"]["built_for"]
    assert findings["versions"]["jax"]
    assert findings["visible"]["JAX_PLATFORMS"] == "cpu"


def test_shared_memory_is_what_the_system_says(capfd: Capture) -> None:
    system = os.statvfs("/dev/shm")
    found = doctor.examine()["shared_memory"]
    assert found["total_bytes"] == system.f_blocks * system.f_frsize
    assert 0 <= found["free_bytes"] <= found["total_bytes"]
    assert main(["doctor"]) == 0
    assert f"total_bytes: {found['total_bytes']}" in capfd.readouterr().out


def test_flags_that_may_change_bits_are_told_from_the_others() -> None:
    kept = ["--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0", "--xla_allow_excess_precision=false"]
    assert doctor.determinism_flags(" ".join(["--xla_dump_to=/x", *kept])) == kept


def test_a_native_library_that_cannot_be_loaded_is_told_and_exits_1(capfd: Capture,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxdp.collectives import native

    def missing() -> None:
        raise ImportError("not built")

    monkeypatch.setattr(native, "load", missing)
    assert main(["doctor"]) == 1
    assert "error: ImportError: not built" in capfd.readouterr().out
