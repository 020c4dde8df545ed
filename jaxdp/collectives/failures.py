"""Turns what a compiled program reports into jaxdp's named exceptions.

XLA raises one class for every error of a custom call. Native code writes `jaxdp.<Kind>: <sentence>`
into the message; the kind is the name of a class in `jaxdp.errors`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from jaxdp import errors

_KINDS = ("RankMismatch", "CollectiveTimeout", "PeerFailure", "CommunicatorClosed")
_PATTERN = re.compile(r"jaxdp\.(" + "|".join(_KINDS) + r"): ([^\n]*)")


def named_failure(text: str) -> errors.CollectiveError | None:
    """The named error inside `text`, or None if it holds none."""
    found = _PATTERN.search(text)
    return getattr(errors, found[1])(found[2]) if found else None


@contextlib.contextmanager
def named_failures() -> Iterator[None]:
    """Raises the named error in place of the runtime error that carries it."""
    try:
        yield
    except errors.JaxdpError:
        raise
    except Exception as error:
        named = named_failure(str(error))
        if named is None:
            raise
        raise named from error
