"""How an error becomes an exit code and a message: the cause in one line, then a traceback if it is unexpected."""

from __future__ import annotations

import sys
import traceback

from jaxdp.errors import BadUse, JaxdpError

DONE, FAILED, BAD_USE, INTERRUPTED = 0, 1, 2, 130


def report(error: BaseException, program: str) -> int:
    """Writes `error` to stderr and returns the exit code: 2 for bad use, 130 for Ctrl-C, else 1.

    The errors of jaxdp are their own sentence; any other is one line with its cause, then its
    traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        _write(f"{program}: interrupted.\n")
        return INTERRUPTED
    if isinstance(error, JaxdpError):
        _write(f"{program}: {error}\n")
        return BAD_USE if isinstance(error, BadUse) else FAILED
    cause = (str(error).splitlines() or [""])[0]
    _write(f"{program}: {type(error).__name__}: {cause}\n")
    _write("".join(traceback.format_exception(error)))
    return FAILED


def note(text: str) -> None:
    """Tells the user something on stderr that is not an error."""
    _write(f"note: {text}\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
