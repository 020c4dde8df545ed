"""The flags of the tools, as typed dataclasses. Imports nothing heavy, so that help is there at once."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jaxdp.config import check_integer, check_number, check_world_size
from jaxdp.runs.flags import Flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Finds where two runs, or two checkpoints, first differ. Exit code 0: the same; 1: they differ."""

    a: Annotated[str, Flag("a run's folder, or a checkpoint's", positional=True)]
    b: Annotated[str, Flag("what to compare it with", positional=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Shows devices, visible GPUs, the native library, shared memory, versions and determinism flags."""

    json: Annotated[bool, Flag("one JSON object instead of lines")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Prints text from a checkpoint of a byte-level model: the same text for the same flags."""

    checkpoint: Annotated[str, Flag("a run's folder (its newest good checkpoint), or a step's folder",
                                    positional=True)]
    prompt: Annotated[str, Flag("text to go on from")] = ""
    length: Annotated[int, Flag("bytes to add")] = 300
    temperature: Annotated[float, Flag("0 takes the likeliest byte each time")] = 0.8
    seed: Annotated[int, Flag("of the choice of bytes")] = 0

    def __post_init__(self) -> None:
        check_integer("length", self.length, minimum=1)
        check_integer("seed", self.seed, minimum=0)
        check_number("temperature", self.temperature, minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes a run's trace in the Chrome/Perfetto form (open it at https://ui.perfetto.dev)."""

    run: Annotated[str, Flag("a run's folder, or a trace.jsonl", positional=True)]
    output: Annotated[str, Flag("file to write", metavar="PATH", short="-o")] = "trace.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Runs `jaxdp train` with one process a rank on this node: jaxdp launch --nproc N -- train [flags of train]."""

    nproc: Annotated[int | None, Flag("how many ranks, one device each: 1, 2, 4 or 8")] = None
    timeout: Annotated[float, Flag(
        "the longest that a rank may stay in one phase (start-up, a step with its compilation, a save) before the "
        "group is ended", metavar="SECONDS")] = 600.0

    def __post_init__(self) -> None:
        check_world_size("nproc", self.nproc)
        check_number("timeout", self.timeout, above=0)
