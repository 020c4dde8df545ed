"""The flags of the tools, as typed dataclasses. Imports nothing heavy, so that help is there at once."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jaxdp.config import check_integer, check_number, check_world_size
from jaxdp.errors import ConfigError
from jaxdp.runs.config import Platform
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
        "the longest that a rank may stay in one phase (a step, a save; at least 60 s for start-up and compilation) "
        "before the group is ended", metavar="SECONDS")] = 600.0

    def __post_init__(self) -> None:
        check_world_size("nproc", self.nproc)
        check_number("timeout", self.timeout, above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """Trains a few steps in every way that promises the same bits and prints the matrix of digests.

    Exit code 0: the promised cells agree; 1: they do not, and the first difference is named.
    """

    model: Annotated[str, Flag("tiny, model-s, bytes-s, gpt2-124m, or module:attribute of your own",
                               metavar="NAME")] = "tiny"
    data: Annotated[str, Flag("kjv, synthetic, ramp, a text file, or a .bin file of uint16 tokens",
                              metavar="NAME|PATH")] = "synthetic"
    steps: Annotated[int, Flag("steps of each training, at least 2")] = 4
    worlds: Annotated[tuple[int, ...], Flag(
        "world sizes, ascending; the largest is the number of shards")] = (1, 2, 4, 8)
    batch: Annotated[int, Flag("sequences of each shard")] = 2
    context: Annotated[int | None, Flag("tokens a sequence (default: the model's longest)")] = None
    seed: Annotated[int, Flag("of initial parameters, data order and dropout")] = 0
    platform: Annotated[Platform, Flag("where to run; cpu gives as many devices as the largest world")] = "auto"
    ranked: Annotated[bool, Flag("train once with a process a rank, too")] = True
    json: Annotated[bool, Flag("one JSON object instead of the table")] = False

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, minimum=2)
        check_integer("batch", self.batch, minimum=1)
        check_integer("seed", self.seed, minimum=0)
        for world in self.worlds:
            check_world_size("worlds", world)
        if not self.worlds or list(self.worlds) != sorted(set(self.worlds)):
            raise ConfigError("worlds", self.worlds, "distinct and ascending world sizes of 1, 2, 4, 8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Does one step of a run again, from the nearest earlier checkpoint, and checks loss and digests.

    Exit code 0: the same bits; 1: others, and the first field that differs is named.
    """

    run: Annotated[str, Flag("a run's folder", positional=True)]
    step: Annotated[int | None, Flag("which step to check")] = None
    devices: Annotated[int | None, Flag("how many devices (default: as many as the run had ranks)")] = None
    platform: Annotated[Platform | None, Flag("where to run (default: where the run was asked to)")] = None
    json: Annotated[bool, Flag("one JSON object instead of a sentence")] = False

    def __post_init__(self) -> None:
        if self.step is not None:
            check_integer("step", self.step, minimum=1)
        if self.devices is not None:
            check_world_size("devices", self.devices)
