"""A route is a pure function of the message; the MI300X starts from its published limits."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from helpers import DTYPES, WORLD_SIZES
from hypothesis import given
from hypothesis import strategies as st

from jaxdp.collectives.operations import Operation
from jaxdp.collectives.routing import TABLES, Route, RouteName, RouteTable, route, table_for

KIB, MIB = 1 << 10, 1 << 20
MI300X = "AMD Instinct MI300X"
OPERATIONS = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER)
KINDS = (*TABLES, "cpu", "a device nobody has measured")


def entries(table: RouteTable, operation: Operation) -> tuple[Route, ...]:
    return getattr(table, operation.name.lower())


@pytest.mark.parametrize(("message_bytes", "name"), [
    (0, "direct"), (4, "direct"), (768 * KIB - 4, "direct"), (768 * KIB, "direct"),
    (768 * KIB + 4, "rank-major"), (MIB, "rank-major"), (2 * MIB + 128 * KIB - 4, "rank-major"),
    (2 * MIB + 128 * KIB + 32, "two-shot"), (25 * MIB, "two-shot"), (64 * MIB, "two-shot"),
])
def test_all_reduce_on_mi300x_is_direct_then_rank_major_then_two_shot(message_bytes: int, name: str) -> None:
    assert route(Operation.ALL_REDUCE, message_bytes, "float32", 8, MI300X).name == name


@pytest.mark.parametrize(("dtype", "limits"), [
    ("bfloat16", (393_216, 1_114_112)), ("float16", (393_216, 1_114_112)), ("float32", (196_608, 557_056))])
def test_the_limits_are_bytes_so_elements_follow_the_dtype(dtype: str, limits: tuple[int, int]) -> None:
    itemsize = 4 if dtype == "float32" else 2
    names = [route(Operation.ALL_REDUCE, (limit + step) * itemsize, dtype, 2, MI300X).name for limit in limits
             for step in (-2, 2)]
    assert names == ["direct", "rank-major", "rank-major", "two-shot"]


def test_a_large_message_that_the_world_does_not_divide_goes_direct() -> None:
    for world in (2, 4, 8):
        assert route(Operation.ALL_REDUCE, 4 * (1_000_000 * world + 1), "float32", world, MI300X).name == "direct"
        assert route(Operation.ALL_REDUCE, 4 * 1_000_000 * world, "float32", world, MI300X).name == "two-shot"


def test_all_gather_on_mi300x_is_direct_to_256_kib_and_rank_major_above() -> None:
    names = [route(Operation.ALL_GATHER, bytes_, "bfloat16", 4, MI300X).name
             for bytes_ in (0, 256 * KIB, 256 * KIB + 2, 64 * MIB)]
    assert names == ["direct", "direct", "rank-major", "rank-major"]


def test_reduce_scatter_on_mi300x_is_direct_at_every_size() -> None:
    names = {route(Operation.REDUCE_SCATTER, 1 << power, "float32", 8, MI300X).name for power in range(2, 40)}
    assert names == {"direct"}


@pytest.mark.parametrize("kind", ["cpu", "a device nobody has measured"])
def test_a_kind_without_measurements_goes_direct_at_every_size(kind: str) -> None:
    for operation in OPERATIONS:
        assert {route(operation, 1 << power, "float32", 4, kind).name for power in range(2, 40)} == {"direct"}


def test_a_table_is_that_of_its_own_device_kind() -> None:
    for kind in TABLES:
        assert table_for(kind) is TABLES[kind]
        assert table_for(kind).device_kind == kind
    assert MI300X in TABLES


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_rises_ends_open_and_says_where_it_comes_from(kind: str) -> None:
    table = table_for(kind)
    for operation in OPERATIONS:
        lines = entries(table, operation)
        assert lines[-1].maximum_bytes is None
        limits = [line.maximum_bytes or 0 for line in lines[:-1]]
        assert limits == sorted(set(limits))
        assert 0 not in limits
        assert all(line.name in get_args(RouteName) for line in lines)
        assert all(len(line.source) > 10 for line in lines)


def test_a_table_cannot_be_changed() -> None:
    table = table_for(MI300X)
    assert isinstance(table, RouteTable)
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.all_reduce = ()  # pyright: ignore[reportAttributeAccessIssue]


@given(operation=st.sampled_from(OPERATIONS), elements=st.integers(0, 1 << 31), dtype=st.sampled_from(DTYPES),
       world=st.sampled_from(WORLD_SIZES), kind=st.sampled_from(KINDS))
def test_every_message_has_one_route_of_its_table_or_goes_direct(
        operation: Operation, elements: int, dtype: str, world: int, kind: str) -> None:
    message_bytes = elements * (4 if dtype == "float32" else 2)
    chosen = route(operation, message_bytes, dtype, world, kind)
    assert chosen == route(operation, message_bytes, dtype, world, kind)
    listed = next(line for line in entries(table_for(kind), operation)
                  if line.maximum_bytes is None or message_bytes <= line.maximum_bytes)
    if chosen != listed:
        assert (listed.name, chosen.name) == ("two-shot", "direct")
        assert elements % world != 0
