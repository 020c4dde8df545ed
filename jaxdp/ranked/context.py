"""Who this process is among the ranks of a run: the one place that reads the ranks' environment."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jaxdp.config import WORLD_SIZES
from jaxdp.errors import ConfigError

RENDEZVOUS_VARIABLE = "JAXDP_RENDEZVOUS"
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# What torchrun, Slurm or a hand-written script set alike on all ranks of one run, and differently between runs.
_RUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


@dataclasses.dataclass(frozen=True)
class RankContext:
    """One rank of a run on one node.

    `rendezvous` is a folder of this node that the ranks of this run, and of no other live run, share.
    """

    rank: int
    local_rank: int
    world_size: int
    rendezvous: Path


def from_environment(environ: Mapping[str, str] | None = None) -> RankContext | None:
    """The rank that `environ` (default: this process's) describes, or None if it names no rank at all.

    `RANK`, `LOCAL_RANK` and `WORLD_SIZE` are set together: a process that was meant to be one of
    several must never train alone because a variable got lost. The rendezvous folder is
    `JAXDP_RENDEZVOUS` where that is set, else one for this user and for the run that `MASTER_ADDR`,
    `MASTER_PORT`, `TORCHELASTIC_RUN_ID`, `SLURM_JOB_ID` and `SLURM_STEP_ID` name.

    Raises:
        ConfigError: some of the three are missing, or one has a value that is not allowed.
    """
    environ = os.environ if environ is None else environ
    if not any(name in environ for name in _RANK_VARIABLES):
        return None
    world_size = _integer(environ, "WORLD_SIZE", "1, 2, 4 or 8")
    if world_size not in WORLD_SIZES:
        raise ConfigError("WORLD_SIZE", environ["WORLD_SIZE"], "1, 2, 4 or 8")
    _check_one_node(environ, world_size)
    below = f"an integer from 0 to WORLD_SIZE - 1 ({world_size - 1})"
    ranks = {name: _integer(environ, name, below) for name in ("RANK", "LOCAL_RANK")}
    for name, value in ranks.items():
        if value >= world_size:
            raise ConfigError(name, environ[name], below)
    return RankContext(ranks["RANK"], ranks["LOCAL_RANK"], world_size, _rendezvous_folder(environ))


def _integer(environ: Mapping[str, str], name: str, allowed: str) -> int:
    text = environ.get(name)
    if text is None:
        there = " and ".join(f"{other}={environ[other]}" for other in _RANK_VARIABLES if other in environ)
        raise ConfigError(name, None, f"set together with {there}, to {allowed}")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(name, text, allowed)
    return int(text)


def _check_one_node(environ: Mapping[str, str], world_size: int) -> None:
    local = environ.get("LOCAL_WORLD_SIZE")
    if local is not None and local != str(world_size):
        raise ConfigError("LOCAL_WORLD_SIZE", local, f"WORLD_SIZE ({world_size}), as all ranks run on one node")


def _rendezvous_folder(environ: Mapping[str, str]) -> Path:
    given = environ.get(RENDEZVOUS_VARIABLE)
    if given is not None:
        if not os.path.isabs(given):
            raise ConfigError(RENDEZVOUS_VARIABLE, given, "the absolute path of a folder on this node")
        return Path(given)
    run = "\n".join(f"{name}={environ.get(name, '')}" for name in _RUN_VARIABLES)
    return Path(tempfile.gettempdir()) / f"jaxdp-{os.getuid()}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
