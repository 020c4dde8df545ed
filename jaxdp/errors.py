"""Every error that jaxdp raises by name.

Two families: `BadUse` (the caller can mend the input; the command line exits 2 and prints the
sentence alone) and the rest (the run failed; exit 1). Each message is one sentence or two: what
was got, what is allowed, what to do.
"""

from __future__ import annotations

from typing import Any


class JaxdpError(Exception):
    """Base of every error raised on purpose by jaxdp."""


class BadUse(JaxdpError):
    """The input is at fault: nothing was started, nothing was changed."""


class ConfigError(BadUse, ValueError):
    """A configuration field has a value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} must be {allowed}; got {value!r}.")
        self.field = field
        self.value = value
        self.allowed = allowed


class DataError(BadUse, ValueError):
    """The data cannot be trained on: missing, too short, or a token outside the vocabulary."""


class RunFolderError(BadUse):
    """The output folder cannot be used: not writable, holding a run, or owned by a live one."""


class UnevenInputs(BadUse, ValueError):
    """Ranks hold different numbers of target tokens and `uneven_inputs` is "reject"."""


class CheckpointError(JaxdpError):
    """A checkpoint could not be written, or none that may be loaded was found."""


class ResumeRefused(BadUse):
    """A resume would change what the run's numbers depend on."""


class StepFailure(JaxdpError):
    """A finished step is not to be trusted; `metrics` is its `StepMetrics`."""

    metrics: Any = None


class NonFiniteGradient(StepFailure):
    """A reduced gradient is not finite; parameters and optimizer state are unchanged."""


class ParameterMismatch(StepFailure):
    """The rank audit found parameters whose bits differ between ranks."""


class CollectiveError(JaxdpError):
    """Base of the errors of the collectives."""


class RankMismatch(CollectiveError):
    """Ranks disagree on operation, shape, dtype or sequence of a collective."""


class CollectiveTimeout(CollectiveError):
    """A peer did not arrive before the deadline."""


class PeerFailure(CollectiveError):
    """A peer is known to be dead."""


class CommunicatorClosed(CollectiveError):
    """The communicator was used after `close()`."""


class StagingError(CollectiveError):
    """The shared memory that a collective needs could not be had."""


class RendezvousError(BadUse):
    """A rank's place in a run is taken by a live process, or the ranks disagree on the run."""
