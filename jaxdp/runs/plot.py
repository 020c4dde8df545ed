"""The loss of a run as a picture, where matplotlib (the extra `plot`) is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdp.runs import strict_json


def plot_loss(records: Sequence[dict[str, Any]], path: Path, title: str) -> bool:
    """Writes a PNG of training and validation loss over steps; False where matplotlib is missing.

    A step whose loss is not finite is a gap in the line.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [strict_json.restore_numbers(record) for record in records]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(*_points(records, "loss"), label="training", linewidth=1)
    if validation := [record for record in records if record.get("validation_loss") is not None]:
        axes.plot(*_points(validation, "validation_loss"), label="validation", marker="o", markersize=3)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.set_title(title.replace("$", r"\$"))
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))
    return True


def _points(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    values = [record[name] if math.isfinite(record[name]) else math.nan for record in records]
    return [record["step"] for record in records], values
