"""The ranks' environment is read in one place, and a wrong one never makes a process train alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from jaxdp.errors import ConfigError
from jaxdp.ranked.context import RankContext, from_environment

GOOD = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "JAXDP_RENDEZVOUS": "/run/here"}


def test_a_full_set_is_a_context() -> None:
    assert from_environment(GOOD) == RankContext(1, 1, 2, Path("/run/here"))


@pytest.mark.parametrize("world", ["1", "2", "4", "8"])
def test_every_world_size_of_one_node_is_taken(world: str) -> None:
    last = str(int(world) - 1)
    context = from_environment({**GOOD, "RANK": last, "LOCAL_RANK": "0", "WORLD_SIZE": world})
    assert context == RankContext(int(last), 0, int(world), Path("/run/here"))


def test_no_variable_at_all_is_no_rank() -> None:
    assert from_environment({"JAXDP_RENDEZVOUS": "/run/here", "SLURM_PROCID": "5", "PATH": "/bin"}) is None


@pytest.mark.parametrize(("changes", "text"), [
    ({"RANK": "2"}, r"RANK must be an integer from 0 to WORLD_SIZE - 1 \(1\); got '2'\."),
    ({"RANK": "-1"}, r"RANK must be .*; got '-1'\."),
    ({"RANK": "one"}, r"RANK must be .*; got 'one'\."),
    ({"RANK": ""}, r"RANK must be .*; got ''\."),
    ({"RANK": "1.0"}, r"RANK must be .*; got '1\.0'\."),
    ({"RANK": "1_0"}, r"RANK must be .*; got '1_0'\."),
    ({"RANK": "\u0661"}, r"RANK must be .*; got '\u0661'\."),
    ({"LOCAL_RANK": "2"}, r"LOCAL_RANK must be an integer from 0 to WORLD_SIZE - 1 \(1\); got '2'\."),
    ({"WORLD_SIZE": "0"}, r"WORLD_SIZE must be 1, 2, 4 or 8; got '0'\."),
    ({"WORLD_SIZE": "3"}, r"WORLD_SIZE must be 1, 2, 4 or 8; got '3'\."),
    ({"WORLD_SIZE": "16"}, r"WORLD_SIZE must be 1, 2, 4 or 8; got '16'\."),
    ({"WORLD_SIZE": "two"}, r"WORLD_SIZE must be 1, 2, 4 or 8; got 'two'\."),
    ({"WORLD_SIZE": ""}, r"WORLD_SIZE must be 1, 2, 4 or 8; got ''\."),
    ({"LOCAL_WORLD_SIZE": "1"}, r"LOCAL_WORLD_SIZE must be WORLD_SIZE \(2\), .* one node; got '1'\."),
    ({"JAXDP_RENDEZVOUS": "here"}, r"JAXDP_RENDEZVOUS must be the absolute path of a folder .*; got 'here'\."),
    ({"JAXDP_RENDEZVOUS": ""}, r"JAXDP_RENDEZVOUS must be .*; got ''\."),
])
def test_a_wrong_value_is_named_with_its_rule(changes: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}$"):
        from_environment({**GOOD, **changes})


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_a_partial_set_is_refused_naming_what_is_missing_and_what_is_there(missing: str) -> None:
    partial = {name: value for name, value in GOOD.items() if name != missing}
    there = " and ".join(f"{name}={GOOD[name]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name != missing)
    with pytest.raises(ConfigError, match=f"^{missing} must be set together with {there}, to .*; got None"):
        from_environment(partial)


def test_ranks_of_one_run_share_a_folder_and_runs_do_not() -> None:
    def folder(rank: str, **changes: str) -> Path:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        context = from_environment({**ranks, "MASTER_PORT": "29500", **changes})
        assert context is not None
        return context.rendezvous

    assert folder("0") == folder("1")
    assert folder("0").parent == Path(tempfile.gettempdir())
    runs = [folder("0"), folder("0", MASTER_PORT="29501"), folder("0", MASTER_ADDR="a"), folder("0", SLURM_JOB_ID="7"),
            folder("0", TORCHELASTIC_RUN_ID="x")]
    assert len(set(runs)) == len(runs)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    assert from_environment() == RankContext(1, 1, 2, Path("/run/here"))
