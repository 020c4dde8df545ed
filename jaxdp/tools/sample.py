"""`jaxdp sample CHECKPOINT`: text from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxdp.tools.options import SampleOptions

DONE = 0


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
