"""The command line: finds the command, parses its flags, calls it, and turns errors into exit codes."""

from __future__ import annotations

import dataclasses
import faulthandler
import sys
from collections.abc import Callable, Sequence

from jaxdp import __version__
from jaxdp.errors import BadUse, ConfigError
from jaxdp.ranked import recorder
from jaxdp.runs.failure import BAD_USE, DONE, report

Arguments = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: one line of help, and the function that takes its arguments and returns the exit code."""

    help: str
    run: Callable[[Arguments], int]


def main(arguments: Arguments | None = None) -> int:
    """Runs `jaxdp` with `arguments` (default: those of the process) and returns the exit code.

    0 done, 1 failed, 2 bad use, 143 and 130 stopped by SIGTERM and Ctrl-C. No error escapes.
    """
    if arguments is None:  # a process of our own: a crash in native code shows where Python was
        faulthandler.enable()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except SystemExit as error:  # argparse after --help
        return int(error.code or 0)
    except BaseException as error:
        return report(error, " ".join(["jaxdp", *words[:1]]) if words and words[0] in COMMANDS else "jaxdp")


def _dispatch(words: list[str]) -> int:
    if words[:1] in (["--help"], ["-h"]):
        _say(_overview())
        return DONE
    if words == ["--version"]:
        _say(f"jaxdp {__version__}")
        return DONE
    if not words:
        sys.stderr.write(_overview() + "\n")
        return BAD_USE
    if words[0] not in COMMANDS:
        raise BadUse(f"unknown command {words[0]!r}; the commands are {', '.join(COMMANDS)}. See: jaxdp --help")
    return COMMANDS[words[0]].run(words[1:])


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: jaxdp COMMAND [flags]", "", "commands:", *lines, "",
                      "jaxdp COMMAND --help tells the flags of a command."])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _train(arguments: Arguments) -> int:
    from jaxdp.runs.config import TrainConfig
    from jaxdp.runs.flags import named_by_flag, parse

    recorder.start()
    config = parse(TrainConfig, "jaxdp train", arguments)
    from jaxdp.runs.train import train

    try:
        code = train(config, ["jaxdp", "train", *arguments])
    except ConfigError as error:
        raise named_by_flag(error, TrainConfig) from None
    recorder.note_done()
    return code


def _launch(arguments: Arguments) -> int:
    from jaxdp.tools.launch import launch

    return launch(arguments)


def _compare(arguments: Arguments) -> int:
    from jaxdp.runs.flags import parse
    from jaxdp.tools.options import CompareOptions

    options = parse(CompareOptions, "jaxdp compare", arguments)
    from jaxdp.tools.compare import compare

    return compare(options)


def _prove(arguments: Arguments) -> int:
    from jaxdp.runs.flags import named_by_flag, parse
    from jaxdp.tools.options import ProveOptions

    options = parse(ProveOptions, "jaxdp prove", arguments)
    from jaxdp.tools.prove import prove

    try:
        return prove(options)
    except ConfigError as error:
        raise named_by_flag(error, ProveOptions) from None


def _replay(arguments: Arguments) -> int:
    from jaxdp.runs.flags import named_by_flag, parse
    from jaxdp.tools.options import ReplayOptions

    options = parse(ReplayOptions, "jaxdp replay", arguments)
    from jaxdp.tools.replay import replay

    try:
        return replay(options)
    except ConfigError as error:
        raise named_by_flag(error, ReplayOptions) from None


def _doctor(arguments: Arguments) -> int:
    from jaxdp.runs.flags import parse
    from jaxdp.tools.options import DoctorOptions

    options = parse(DoctorOptions, "jaxdp doctor", arguments)
    from jaxdp.tools.doctor import doctor

    return doctor(options)


def _sample(arguments: Arguments) -> int:
    from jaxdp.runs.flags import parse
    from jaxdp.tools.options import SampleOptions

    options = parse(SampleOptions, "jaxdp sample", arguments)
    from jaxdp.tools.sample import sample

    return sample(options)


def _trace(arguments: Arguments) -> int:
    from jaxdp.runs.flags import parse
    from jaxdp.tools.options import ExportOptions

    if arguments[:1] in (["--help"], ["-h"]):
        _say("usage: jaxdp trace export RUN [flags]\n\nWrites a run's trace in the Chrome/Perfetto form.")
        return DONE
    if arguments[:1] != ["export"]:
        raise BadUse(f"jaxdp trace takes 'export'; got {arguments[0] if arguments else 'nothing'!r}. "
                     f"See: jaxdp trace export --help")
    options = parse(ExportOptions, "jaxdp trace export", arguments[1:])
    from jaxdp.tools.trace import export

    return export(options)


COMMANDS = {
    "train": Command("train a model and leave a run package", _train),
    "launch": Command("train with one process a rank on this node", _launch),
    "compare": Command("the first step and parameter at which two runs or checkpoints differ", _compare),
    "prove": Command("the same bits at every world size, bucket limit and transport, over a stop: the matrix", _prove),
    "replay": Command("one step of a run done again, its loss and digests compared with the record", _replay),
    "sample": Command("text from a checkpoint of a byte-level model", _sample),
    "trace": Command("a run's trace in the Chrome/Perfetto form", _trace),
    "doctor": Command("devices, native library, shared memory, versions, determinism flags", _doctor),
}
