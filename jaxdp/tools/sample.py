"""`jaxdp sample CHECKPOINT`: text from a checkpoint."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

from jaxdp.config import check_integer, check_number
from jaxdp.runs.flags import Flag

DONE = 0


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


def sample(options: SampleOptions) -> int:
    """Prints prompt and text. Raises `CheckpointError` or `ConfigError` where there is nothing to sample from."""
    from jaxdp.runs import resume
    from jaxdp.runs.sample import sample as text_of

    state = resume.locate(Path(options.checkpoint)).state
    text = text_of(state, prompt=options.prompt, length=options.length, temperature=options.temperature,
                   seed=options.seed)
    sys.stdout.buffer.write((options.prompt + text + "\n").encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()
    return DONE
