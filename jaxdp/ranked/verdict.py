"""Why a group of ranks ended: the first cause, what followed from it, and the exit code. Pure."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

from jaxdp.ranked.recorder import Outcome, Position

DONE, FAILED, BAD_USE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
_GOOD_CODES = (DONE, INTERRUPTED, TERMINATED)


@dataclasses.dataclass(frozen=True)
class RankEnd:
    """How one rank ended, or is about to.

    `told_to_end`: the launcher ended it for the sake of the others. `stuck` says in words why the
    launcher thinks that the rank does not go on, "" if it does not think so.
    """

    rank: int
    returncode: int | None
    ended_ns: int
    position: Position
    last_line: str = ""
    told_to_end: bool = False
    stuck: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the rank did all that was asked of it; one that just exits 0 has not."""
        return self.position.outcome == Outcome.DONE and self.returncode in _GOOD_CODES

    @property
    def has_failed(self) -> bool:
        """Whether it ended, or says that it will end, otherwise than it should."""
        failing = self.position.outcome in (Outcome.FAILED, Outcome.CONSEQUENCE)
        return failing or (self.returncode is not None and not self.is_good)

    @property
    def is_refusal(self) -> bool:
        """Whether the rank refused its input, in a sentence."""
        return self.returncode == BAD_USE and self.position.sentence != ""

    @property
    def is_consequence(self) -> bool:
        """Whether its failure has its cause at another rank or at the launcher."""
        if self.position.outcome == Outcome.FAILED:
            return False
        return self.position.outcome == Outcome.CONSEQUENCE or self.told_to_end

    @property
    def time_ns(self) -> int:
        """When it failed."""
        return self.position.time_ns if self.position.sentence else self.ended_ns


def first_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank at which the failure began, None if none has failed.

    A rank that is stuck comes before the timeouts of those that waited for it; a failure of its own
    before consequences, and the earlier before the later.
    """
    stuck = [end for end in ends if end.stuck]
    failed = sorted((end for end in ends if end.has_failed), key=lambda end: (end.is_consequence, end.time_ns))
    if stuck and (not failed or failed[0].is_consequence):
        return min(stuck, key=lambda end: end.position.count)
    return failed[0] if failed else None


def hindmost(positions: Sequence[Position]) -> int:
    """The count of the rank that is furthest behind."""
    return min(position.count for position in positions)


def exit_code(ends: Sequence[RankEnd]) -> int:
    """Rank 0's where all did what was asked, 2 if the input was refused, 130 for Ctrl-C, else 1."""
    cause = first_cause(ends)
    if cause is None:
        return ends[0].returncode or DONE
    return cause.returncode if cause.returncode in (BAD_USE, INTERRUPTED) and not cause.stuck else FAILED


def explain(ends: Sequence[RankEnd]) -> list[str]:
    """A line for the first cause, then one for each other rank that has something else to say."""
    cause = first_cause(ends)
    if cause is None:
        return []
    others = [end for end in ends if end is not cause and end.has_failed and end.position.sentence
              and end.position.sentence != cause.position.sentence]
    return [_describe(cause), *(f"then rank {end.rank}: {end.position.sentence}" for end in others)]


def _describe(end: RankEnd) -> str:
    sentence = end.position.sentence
    if end.stuck:
        return f"rank {end.rank} {end.stuck}; it is at {end.position}."
    if end.is_refusal:
        return f"rank {end.rank} refused: {sentence}"
    if end.returncode is not None and end.returncode < 0:
        by = "the launcher, which was asked to end," if end.told_to_end else _signal_name(-end.returncode)
        return f"rank {end.rank} was killed by {by} at {end.position}."
    if sentence:
        return f"rank {end.rank} failed (exit {end.returncode}) at {end.position}: {sentence}"
    if end.returncode == DONE:
        return f"rank {end.rank} exited with 0 before the run was done, at {end.position}."
    last = f"; its last line: {end.last_line}" if end.last_line else ""
    return f"rank {end.rank} exited with {end.returncode} at {end.position}{last}."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
