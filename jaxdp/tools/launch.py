"""`jaxdp launch`: refuses once what all ranks would refuse, then starts `jaxdp train` as one process a rank."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from jaxdp.errors import BadUse, ConfigError
from jaxdp.ranked.launch import launch as launch_ranks
from jaxdp.ranked.verdict import BAD_USE
from jaxdp.runs import folder
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.flags import named_by_flag, parse
from jaxdp.tools.options import LaunchOptions

PROGRAM = "jaxdp launch"
# -P: a file of the working directory must not pass for a module; `jaxdp train` does not look there either.
_RANK_PROGRAM = ("-P", "-c", "import sys; from jaxdp.cli import main; sys.exit(main())")


def launch(arguments: Sequence[str]) -> int:
    """Runs `[flags] -- train [flags of train]` and returns the group's exit code.

    Raises `BadUse` with nothing started where flags, model, data path or shards are at fault.
    """
    own, command = _split(list(arguments))
    options = parse(LaunchOptions, PROGRAM, own)
    config = _checked(command, options)
    from jaxdp.runs.train import RUNS_FOLDER  # here and below: they import NumPy, which help does not need

    chosen = None if config.output else folder.new_folder(RUNS_FOLDER, config.model)
    output = [] if chosen is None else ["--output", str(chosen)]
    code = BAD_USE
    try:
        code = launch_ranks([sys.executable, *_RANK_PROGRAM, *command, *output], options.nproc or 1,
                            platform=config.platform, timeout_s=options.timeout)
    finally:
        if code == BAD_USE and chosen is not None and not folder.holds_run(chosen):
            shutil.rmtree(chosen, ignore_errors=True)
    return code


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in words:
        if "train" in words:
            raise BadUse(f"-- must stand before train; got {PROGRAM} {' '.join(words)}.")
        return words, []
    middle = words.index("--")
    return words[:middle], words[middle + 1:]


def _checked(command: list[str], options: LaunchOptions) -> TrainConfig:
    if command[:1] != ["train"]:
        raise BadUse(f"the command after -- must be train; got {command[0] if command else 'nothing'!r}. "
                     f"Say: {PROGRAM} --nproc {options.nproc} -- train [flags of train]")
    if any(word.partition("=")[0] == "--devices" for word in command):
        raise BadUse(f"--devices must be left out under {PROGRAM}, where each of the --nproc {options.nproc} ranks has "
                     f"one device.")
    config = parse(TrainConfig, f"{PROGRAM} -- train", command[1:])
    from jaxdp.runs import job

    try:
        config.data_parallel(tuple(range(options.nproc or 1)))
        job.check_names(config)
    except ConfigError as error:
        raise named_by_flag(error, TrainConfig) from None
    return config
