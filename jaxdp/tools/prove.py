"""`jaxdp prove`: does one training in every way that promises the same bits, and compares them."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxdp.errors import BadUse
from jaxdp.ranked import context as ranked
from jaxdp.runs import job, platform
from jaxdp.runs.config import TrainConfig
from jaxdp.tools import prove_report
from jaxdp.tools.matrix import Cell, Trail, first_difference, idle_field, plan, references
from jaxdp.tools.options import ProveOptions
from jaxdp.tools.prove_report import Outcome

AGREE, DIFFER = 0, 1


def prove(options: ProveOptions) -> int:
    """Prints the matrix of digests; returns 0 if every promised cell agrees with its reference, else 1.

    Raises `BadUse` where the model, the data or the devices are not there.
    """
    if ranked.from_environment() is not None:
        raise BadUse("jaxdp prove starts its own ranks; unset RANK, LOCAL_RANK and WORLD_SIZE.")
    cells = plan(options.worlds, ranked=options.ranked)
    job.check_names(train_config(cells[0], options))
    platform.select(options.platform, options.worlds[-1])
    with tempfile.TemporaryDirectory(prefix="jaxdp-prove-") as folder:
        outcomes = _run_all(cells, options, Path(folder))
    prove_report.write(outcomes, as_json=options.json)
    return AGREE if prove_report.all_agree(outcomes) else DIFFER


def _run_all(cells: Sequence[Cell], options: ProveOptions, folder: Path) -> list[Outcome]:
    """Every cell in turn, its trail compared with its group's reference and then dropped."""
    from jaxdp.tools import trails  # imports JAX, now that the platform is chosen

    # Processes of their own come first: on a GPU this one, once started, would hold their memory.
    early: dict[Cell, Trail] = {}
    for cell in (cell for cell in cells if cell.ranked):
        _tell(f"first: {cell.name}")
        early[cell] = trails.of_ranks(cell, train_config(cell, options), folder / "ranks")
    platform.check_devices(options.platform, options.worlds[-1])
    outcomes: list[Outcome] = []
    first, kept = references(cells), dict[str, Trail]()
    for index, cell in enumerate(cells):
        _tell(f"{index + 1} of {len(cells)}: {cell.name}")
        trail = early.get(cell) or trails.of_cell(cell, train_config(cell, options), folder / str(index))
        outcomes.append(_outcome(cell, first[cell.group], trail, kept.setdefault(cell.group, trail)))
    return outcomes


def _outcome(cell: Cell, reference_cell: Cell, trail: Trail, reference: Trail) -> Outcome:
    from jaxdp.runs import checkpoint

    is_reference = cell == reference_cell
    difference = first_difference(reference, trail)
    if is_reference and (name := idle_field(trail)):
        difference = f"{name} is the same at two steps: such a training proves nothing"
    sha256 = hashlib.sha256(b"".join(checkpoint.encode(trail.state))).hexdigest()
    return Outcome(cell, None if is_reference else reference_cell.name, tuple(trail.records), sha256, difference)


def train_config(cell: Cell, options: ProveOptions) -> TrainConfig:
    """The cell as a run. Every cell's global batch is the same: `batch` sequences for each of the largest world."""
    parts = cell.shards or cell.world
    return TrainConfig(
        model=options.model, data=options.data, steps=options.steps, seed=options.seed, context=options.context,
        batch=options.batch * options.worlds[-1] // parts, platform=options.platform, devices=cell.world,
        shards=cell.shards, step_mode=cell.step_mode, reducer=cell.reducer, bucket_bytes=cell.bucket_bytes)


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")
