"""How an error becomes an exit code and a message: the cause in one line, then a traceback if it is unexpected."""

from __future__ import annotations

import sys
import traceback

from jaxdp.errors import BadUse, CollectiveTimeout, JaxdpError, PeerFailure
from jaxdp.ranked import recorder

DONE, FAILED, BAD_USE, INTERRUPTED = 0, 1, 2, 130


def report(error: BaseException, program: str) -> int:
    """Writes `error` to stderr and returns the exit code: 2 for bad use, 130 for Ctrl-C, else 1.

    The errors of jaxdp are their own sentence; any other is one line with its cause, then its
    traceback.
    """
    # A launcher learns of it before it can read of it: it then tells the first cause first.
    recorder.note_failure(_sentence(error), consequence=isinstance(error, (PeerFailure, CollectiveTimeout)))
    if isinstance(error, KeyboardInterrupt):
        _write(f"{program}: interrupted.\n")
        return INTERRUPTED
    if isinstance(error, JaxdpError):
        _write(f"{program}: {error}\n")
        return BAD_USE if isinstance(error, BadUse) else FAILED
    _write(f"{program}: {_sentence(error)}\n")
    _write("".join(traceback.format_exception(error)))
    return FAILED


def _sentence(error: BaseException) -> str:
    """One line: an error of jaxdp by its message, any other with its name."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted."
    cause = (str(error).splitlines() or [""])[0]
    return cause if isinstance(error, JaxdpError) else f"{type(error).__name__}: {cause}"


def note(text: str) -> None:
    """Tells the user something on stderr that is not an error."""
    _write(f"note: {text}\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
