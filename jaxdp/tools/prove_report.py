"""What `jaxdp prove` found, as a table for people or as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxdp.runs import environment, strict_json
from jaxdp.tools.difference import COMPARED
from jaxdp.tools.matrix import Cell, Record

_DIGITS = 8


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A cell, the name of the cell it was compared with (None: it is a reference), and where it differs."""

    cell: Cell
    reference: str | None
    records: tuple[Record, ...]
    state_sha256: str
    difference: str | None

    @property
    def failed(self) -> bool:
        """Whether a promise is broken."""
        return self.cell.promised and self.difference is not None

    @property
    def verdict(self) -> str:
        """A few words for the table."""
        if self.reference is None and self.difference is None:
            return "reference"
        agrees = "equal" if self.difference is None else "DIFFERS" if self.cell.promised else "differs"
        return agrees if self.cell.promised else f"{agrees}, no promise"


def all_agree(outcomes: Sequence[Outcome]) -> bool:
    """Whether every promised cell agrees, and every group has two that could differ."""
    compared = {outcome.cell.group for outcome in outcomes if outcome.cell.promised and outcome.reference is not None}
    return compared == {outcome.cell.group for outcome in outcomes} and not any(o.failed for o in outcomes)


def write(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    """Writes to stdout."""
    if as_json:
        sys.stdout.write(strict_json.dumps(_content(outcomes), indent=2) + "\n")
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    console.print(_table(outcomes))
    for line in closing_lines(outcomes):
        console.print(Text(line), soft_wrap=True)


def closing_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """The broken promises, the first one first; then the verdict."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    lines = [_sentence(outcome) for outcome in failed]
    promised = sum(outcome.cell.promised for outcome in outcomes)
    if all_agree(outcomes):
        return [f"{promised} promised cells agree to the bit; those not promised are shown for comparison"]
    return [*lines, f"{len(failed)} of {promised} promised cells differ"]


def _sentence(outcome: Outcome) -> str:
    against = "" if outcome.reference is None else f" differs from {outcome.reference}"
    return f"{outcome.cell.group}: {outcome.cell.name}{against}: {outcome.difference}"


def _table(outcomes: Sequence[Outcome]) -> Table:
    """At most 80 columns wide; a section for each group."""
    table = Table("cell", "loss", "gradient", "params", "verdict", box=box.SIMPLE, pad_edge=False,
                  collapse_padding=True, title=f"after step {outcomes[0].records[-1]['step']}; every step is compared")
    for group, members in itertools.groupby(outcomes, lambda outcome: outcome.cell.group):
        table.add_row(group, style="bold")
        for outcome in members:
            last = outcome.records[-1]
            table.add_row(f"  {outcome.cell.name}", _number(last["loss"]),
                          *(str(last[name])[:_DIGITS] for name in COMPARED[1:]), outcome.verdict,
                          style="bold red" if outcome.failed else "" if outcome.cell.promised else "dim")
        table.add_section()
    return table


def _number(loss: Any) -> str:
    return loss if isinstance(loss, str) else f"{loss:.7g}"


def _content(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"agree": all_agree(outcomes), "closing": closing_lines(outcomes), "packages": environment.packages(),
            "devices": environment.devices(), "cells": [_cell_content(outcome) for outcome in outcomes]}


def _cell_content(outcome: Outcome) -> dict[str, Any]:
    steps = [{"step": record["step"], **{name: record[name] for name in COMPARED}} for record in outcome.records]
    return {**dataclasses.asdict(outcome.cell), "compared_with": outcome.reference, "equal": outcome.difference is None,
            "difference": outcome.difference, "state_sha256": outcome.state_sha256, "steps": steps}
