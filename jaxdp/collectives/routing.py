"""Which way a message goes: a pure function over one table per device kind.

Routes differ in bytes moved, never in bits.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxdp.collectives.operations import Operation

RouteName = Literal["direct", "two-shot", "rank-major"]

KIB, MIB = 1 << 10, 1 << 20


@dataclasses.dataclass(frozen=True)
class Route:
    """One line of a table: up to `maximum_bytes` (inclusive; None: no limit) go this way."""

    name: RouteName
    maximum_bytes: int | None
    source: str


@dataclasses.dataclass(frozen=True)
class RouteTable:
    """Routes of one device kind, each operation's in rising order of `maximum_bytes`."""

    device_kind: str
    all_reduce: tuple[Route, ...]
    all_gather: tuple[Route, ...]
    reduce_scatter: tuple[Route, ...]


_CPU_SOURCE = "host memory: every worker reads each input once, whatever the size"
_CPU_IPC_SOURCE = ("Xeon, 2 cores, 2026-11-30, raw calls at world 4: 512 KiB one-shot 228 us, two-shot 222; 4 MiB 4555 "
                   "and 3498; 64 KiB 22 and 49")
_MI300X_SOURCE = "limits published with the first ROCm collectives for MI300X; not measured here"

TABLES = {
    "cpu": RouteTable(
        device_kind="cpu",
        all_reduce=(Route("direct", None, _CPU_SOURCE),),
        all_gather=(Route("direct", None, _CPU_SOURCE),),
        reduce_scatter=(Route("direct", None, _CPU_SOURCE),)),
    "cpu-ipc": RouteTable(
        device_kind="cpu-ipc",
        all_reduce=(Route("direct", 512 * KIB, _CPU_IPC_SOURCE), Route("two-shot", None, _CPU_IPC_SOURCE)),
        all_gather=(Route("direct", None, _CPU_IPC_SOURCE),),
        reduce_scatter=(Route("direct", None, _CPU_IPC_SOURCE),)),
    "AMD Instinct MI300X": RouteTable(
        device_kind="AMD Instinct MI300X",
        all_reduce=(Route("direct", 768 * KIB, _MI300X_SOURCE),
                    Route("rank-major", 2 * MIB + 128 * KIB - 1, _MI300X_SOURCE),
                    Route("two-shot", None, _MI300X_SOURCE)),
        all_gather=(Route("direct", 256 * KIB, _MI300X_SOURCE), Route("rank-major", None, _MI300X_SOURCE)),
        reduce_scatter=(Route("direct", None, _MI300X_SOURCE),)),
}


def rank_major_table(device_kind: str) -> RouteTable:
    """The table of the xla transport, which has one way for everything."""
    lines = (Route("rank-major", None, "the xla transport: XLA moves the bytes, the tree runs locally"),)
    return RouteTable(device_kind, lines, lines, lines)


def table_for(device_kind: str) -> RouteTable:
    """The table of a device kind; a kind without one takes the direct way everywhere."""
    source = f"no table for {device_kind!r}"
    direct = (Route("direct", None, source),)
    return TABLES.get(device_kind, RouteTable(device_kind, direct, direct, direct))


def route(operation: Operation, message_bytes: int, dtype: str, world: int, device_kind: str) -> Route:
    """The route of one message of `message_bytes` input bytes a rank.

    The two-shot way needs elements that the world size divides; others go direct.
    """
    if operation == Operation.BARRIER:
        return Route("direct", None, "a barrier carries no bytes")
    entries: tuple[Route, ...] = getattr(table_for(device_kind), operation.name.lower())
    chosen = next(entry for entry in entries if entry.maximum_bytes is None or message_bytes <= entry.maximum_bytes)
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
    if chosen.name == "two-shot" and (message_bytes // width) % world:
        return dataclasses.replace(chosen, name="direct", source="the element count does not divide by the world size")
    return chosen
