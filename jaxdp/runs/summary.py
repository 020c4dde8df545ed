"""What a run came to, computed from its metrics records alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from jaxdp.runs import strict_json

Record = dict[str, Any]


def summarize(records: Sequence[Record], *, status: str, checkpoints: Sequence[Record]) -> Record:
    """The contents of `summary.json`. `records` are metrics records in the order of their steps.

    Medians and `tokens_per_s` leave out the steps that compiled something; where no other step is
    left they are None, and so is the median of a time that no step knows. `compile_ms` is the sum
    of all compile times.
    """
    records = [strict_json.restore_numbers(record) for record in records]
    steady = [record for record in records if record.get("compile_ms") is None]
    compiling = _known(records, "compile_ms")
    losses = [record["loss"] for record in records]
    differences = _known(records, "maximum_parameter_difference")
    validation = _known(records, "validation_loss")
    return {
        "status": status,
        "steps": records[-1]["step"] if records else 0,
        "initial_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "validation_loss": validation[-1] if validation else None,
        "maximum_parameter_difference": max(differences) if differences else None,
        "parameter_checks": {outcome: sum(record["parameter_check"] == outcome for record in records)
                             for outcome in ("ok", "mismatch", "skipped")},
        "medians": {name: _median(steady, name) for name in _time_names(records)},
        "compile_ms": sum(compiling) if compiling else None,
        "tokens_per_s": _tokens_per_s(steady),
        "parameter_digest": records[-1]["parameter_digest"] if records else None,
        "checkpoints": list(checkpoints),
    }


def _known(records: Sequence[Record], name: str) -> list[Any]:
    return [record[name] for record in records if record.get(name) is not None]


def _time_names(records: Sequence[Record]) -> list[str]:
    return [name for name in records[0] if name.endswith("_ms") and name != "compile_ms"] if records else []


def _median(records: Sequence[Record], name: str) -> float | None:
    values = _known(records, name)
    return statistics.median(values) if values else None


def _tokens_per_s(records: Sequence[Record]) -> float | None:
    milliseconds = sum(record["total_ms"] for record in records)
    return sum(record["tokens"] for record in records) / (milliseconds / 1e3) if milliseconds > 0 else None
