"""What `jaxdp prove` compares: the cells, which of them must agree, and where two of them first differ. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxdp.config import MIB, Reducer, StepMode
from jaxdp.tools.difference import COMPARED, first_tensor_difference, record_differences

if TYPE_CHECKING:
    from jaxdp.collectives import Transport
    from jaxdp.runs.checkpoint import State

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to do the same training.

    Cells of one `group` are compared with the first of it. `promised`: they must agree; the others
    are shown. `then` is the world size that goes on after a stop in the middle. `ranked`: a process
    a rank.
    """

    name: str
    group: str
    promised: bool = True
    world: int
    shards: int | None
    step_mode: StepMode = "auto"
    reducer: Reducer = "tree"
    transport: Transport = "auto"
    bucket_bytes: int = 25 * MIB
    then: int | None = None
    ranked: bool = False


@dataclasses.dataclass(frozen=True)
class Trail:
    """What a cell left: its metrics records, one a step, and its last state."""

    records: Sequence[Record]
    state: State


def plan(worlds: Sequence[int], *, ranked: bool) -> list[Cell]:
    """The cells for these world sizes, ascending; those with shards first. The first of a group is its reference."""
    return [*_with_shards(worlds, ranked), *_without_shards(worlds)]


def _with_shards(worlds: Sequence[int], ranked: bool) -> list[Cell]:
    least, most = worlds[0], worlds[-1]
    shared: dict[str, Any] = {"group": f"{most} shards", "shards": most}
    cells = [Cell(name=f"world {world}", world=world, **shared) for world in worlds]
    cells.append(Cell(name=f"world {most}, small buckets", world=most, bucket_bytes=1, **shared))
    cells.append(Cell(name=f"world {most}, transport xla", world=most, transport="xla", **shared))
    cells.append(Cell(name=f"world {most}, stop, world {least}", world=most, then=least, **shared))
    if ranked:
        world = next((world for world in worlds if world > 1), 1)
        cells.append(Cell(name=f"world {world}, process a rank", world=world, ranked=True, **shared))
    return cells


def _without_shards(worlds: Sequence[int]) -> list[Cell]:
    least, most = worlds[0], worlds[-1]
    shared: dict[str, Any] = {"group": f"no shards, world {most}", "shards": None}
    fused: dict[str, Any] = shared | {"step_mode": "fused"}
    cells = [Cell(name="fused", world=most, **fused),
             Cell(name="fused, small buckets", world=most, bucket_bytes=1, **fused)]
    if most > least:
        cells.append(Cell(name=f"fused, world {least}", world=least, promised=False, **fused))
    cells.append(Cell(name="staged", world=most, step_mode="staged", promised=False, **shared))
    cells.append(Cell(name="fused, psum", world=most, reducer="psum", promised=False, **fused))
    return cells


def references(cells: Sequence[Cell]) -> dict[str, Cell]:
    """The first cell of each group."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.group, cell)
    return first


def first_difference(reference: Trail, other: Trail) -> str | None:
    """Where `other` first differs, by step and then by tensor of the last state; None where all bits agree."""
    one, two = ([record["step"] for record in trail.records] for trail in (reference, other))
    if one != two:
        return f"steps {one} and {two}"
    for left, right in zip(reference.records, other.records, strict=True):
        if found := record_differences(left, right):
            return f"step {left['step']}: {'; '.join(found)}"
    tensor = first_tensor_difference(reference.state.tensors, other.state.tensors)
    if tensor is not None:
        at = "" if tensor.index is None else f" at {list(tensor.index)}"
        return f"after step {reference.state.step}: {tensor.name}{at}, {tensor.reason}"
    if reference.state.cursor != other.state.cursor:
        return f"data cursor {reference.state.cursor} and {other.state.cursor}"
    return None


def idle_field(trail: Trail) -> str | None:
    """A compared field that has one value at two steps: a run that does not move proves nothing."""
    for name in COMPARED[1:]:
        if len({record[name] for record in trail.records}) < len(trail.records):
            return name
    return None
