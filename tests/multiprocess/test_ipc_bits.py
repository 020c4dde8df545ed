"""Between processes every sum is the balanced tree, bit for bit, at every world, size, route and cut."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPES, assert_bits_equal, bits, canary, canary_sum, cancelling, numpy_dtype

from jaxdp.tree import tree_sum
from multiprocess.member import ONE_SHOT, TWO_SHOT, Member
from multiprocess.ranks import Ranks

ROUTES = {"one-shot": ONE_SHOT, "two-shot": TWO_SHOT}
STAGING_BYTES = 4096  # so that a cut comes every 1024 float32 or 2048 16-bit elements of an all_reduce


def sizes(world: int, dtype: str) -> list[int]:
    """0, odd and small sizes, and one element around each of the first two cuts of every operation."""
    cut = STAGING_BYTES // numpy_dtype(dtype).itemsize
    around = [edge + off for edge in (cut // world, cut, 2 * cut) for off in (-1, 0, 1)]
    return sorted({0, 1, 2, 3, 7, 31, 64, 65, *around})


def check_all_operations(one_shot_bytes: int) -> None:
    member = Member(one_shot_bytes=one_shot_bytes, staging_bytes=STAGING_BYTES)
    for dtype in DTYPES:
        for count in sizes(member.world, dtype):
            check_size(member, count, dtype)
    member.close()


def check_size(member: Member, count: int, dtype: str) -> None:
    what = f"{dtype}[{count}] at world {member.world}"
    x = cancelling(member.world, count, dtype, seed=count)
    assert_bits_equal(member.all_reduce(x[member.rank])[0], tree_sum(x), f"all_reduce {what}")
    assert_bits_equal(member.all_gather(x[member.rank])[0], x.reshape(-1), f"all_gather {what}")
    blocks = cancelling(member.world, member.world * count, dtype, seed=count + 1)
    assert_bits_equal(member.reduce_scatter(blocks[member.rank])[0],
                      tree_sum(blocks).reshape(member.world, count)[member.rank], f"reduce_scatter {what}")
    member.barrier()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_operation_gives_the_trees_bits(ranks: Ranks, world: int, route: str) -> None:
    ranks.run("test_ipc_bits:check_all_operations", world, one_shot_bytes=ROUTES[route])


def check_one_constant_at_every_size() -> None:
    members = [Member(one_shot_bytes=limit, staging_bytes=1 << 18) for limit in (256 << 10, 768 << 10)]
    limits = [256 << 10, 768 << 10, 2176 << 10]  # bytes
    for dtype in DTYPES:
        width = numpy_dtype(dtype).itemsize
        counts = [*range(1, 34), *(limit // width + off for limit in limits for off in (-1, 0, 1))]
        x = canary(members[0].world, counts[-1], dtype)[members[0].rank]
        expected = canary_sum(members[0].world, counts[-1], dtype)
        for count in counts:
            for member in members:
                assert_bits_equal(member.all_reduce(x[:count])[0], expected[:count], f"{dtype}[{count}]")
    for member in members:
        member.close()


@pytest.mark.parametrize("world", [4, 8])
def test_order_sensitive_sums_are_one_constant_around_every_route_limit(ranks: Ranks, world: int) -> None:
    ranks.run("test_ipc_bits:check_one_constant_at_every_size", world)


def special_values(world: int, dtype: str) -> np.ndarray:
    """NaNs with payloads, infinities of both signs, signed zeros and subnormals, in every pairing of two ranks."""
    narrow = {"float32": [0x7FC00123, 0xFF800001, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x80000001, 0x007FFFFF],
              "float16": [0x7E01, 0xFC01, 0x7C00, 0xFC00, 0, 0x8000, 1, 0x8001, 0x03FF],
              "bfloat16": [0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0, 0x8000, 1, 0x8001, 0x007F]}[dtype]
    values = np.array(narrow, f"u{numpy_dtype(dtype).itemsize}")
    rows = [np.roll(np.repeat(values, len(values)), -rank) if rank % 2 else np.tile(values, len(values))
            for rank in range(world)]
    return np.stack(rows).view(numpy_dtype(dtype))


def check_special_values() -> None:
    for limit in (ONE_SHOT, TWO_SHOT):
        member = Member(one_shot_bytes=limit)
        for dtype in DTYPES:
            x = special_values(member.world, dtype)
            assert_bits_equal(member.all_reduce(x[member.rank])[0], tree_sum(x), f"special {dtype}")
            assert_bits_equal(member.all_gather(x[member.rank])[0], x.reshape(-1), f"gathered {dtype}")
            clean = cancelling(member.world, 100, dtype)
            assert_bits_equal(member.all_reduce(clean[member.rank])[0], tree_sum(clean), "the next call")
        member.close()


@pytest.mark.parametrize("world", [2, 4])
def test_special_values_follow_the_definition_and_leave_nothing_for_the_next_call(ranks: Ranks, world: int) -> None:
    ranks.run("test_ipc_bits:check_special_values", world)


def check_prefixes() -> None:
    for limit in (ONE_SHOT, TWO_SHOT):
        member = Member(one_shot_bytes=limit)
        x = cancelling(member.world, 3001, "bfloat16")[member.rank]
        whole = member.all_reduce(x)[0]
        for count in (1, 8, 511, 2048, 3000):
            assert_bits_equal(member.all_reduce(x[:count])[0], whole[:count], f"the first {count}")
            assert_bits_equal(member.all_reduce(x[1:count])[0], whole[1:count], "a misaligned start")
        member.close()


def test_a_prefix_or_a_misaligned_part_sums_to_the_same_bits(ranks: Ranks) -> None:
    ranks.run("test_ipc_bits:check_prefixes", 4)


def check_lanes() -> None:
    for limit in (ONE_SHOT, TWO_SHOT):
        member = Member(one_shot_bytes=limit)
        kinds = ((3, "float32"), (0, "bfloat16"), (700, "float16"), (129, "bfloat16"), (1, "float16"))
        lanes = [cancelling(member.world, member.world * count, dtype, seed=count) for count, dtype in kinds]
        own = [lane[member.rank] for lane in lanes]
        for lane, many, single in zip(lanes, member.all_reduce(*own), map(member.all_reduce, own), strict=True):
            assert_bits_equal(many, tree_sum(lane))
            assert_bits_equal(many, single[0])
        for lane, many in zip(lanes, member.reduce_scatter(*own), strict=True):
            assert_bits_equal(many, tree_sum(lane).reshape(member.world, -1)[member.rank])
        before = member.calls()
        member.reduce_scatter(*own)
        assert member.calls() == before + 1
        member.close()


@pytest.mark.parametrize("world", [2, 8])
def test_lanes_of_one_call_have_their_own_trees_whatever_their_dtypes(ranks: Ranks, world: int) -> None:
    ranks.run("test_ipc_bits:check_lanes", world)


def check_gathered_bytes() -> None:
    member = Member()
    for dtype in ("uint8", "int32", "float64", "complex128"):
        x = np.arange(member.world * 1025 * 2).reshape(member.world, 1025, 2).astype(dtype)
        assert np.array_equal(bits_or_bytes(member.all_gather(x[member.rank])[0]), bits_or_bytes(x.reshape(-1, 2)))
    member.close()


def bits_or_bytes(array: np.ndarray) -> np.ndarray:
    return bits(array) if array.dtype.itemsize <= 8 else np.ascontiguousarray(array).view(np.uint8)


def test_all_gather_copies_any_dtype(ranks: Ranks) -> None:
    ranks.run("test_ipc_bits:check_gathered_bytes", 4)


def check_lanes_of_two_communicators() -> None:
    members = [Member() for _ in range(2)]
    lanes = [np.full(100, value, np.float32) for value in (1, 2, 3, 4)]
    for member in members:
        sums = [result[0] for result in map(member.all_reduce, lanes)]
        assert [set(result.tolist()) for result in sums] == [{2.0}, {4.0}, {6.0}, {8.0}]
        assert [set(result.tolist()) for result in member.all_reduce(*lanes)] == [{2.0}, {4.0}, {6.0}, {8.0}]
    for member in members:
        member.close()


def test_lanes_and_communicators_do_not_read_each_others_staging(ranks: Ranks) -> None:
    ranks.run("test_ipc_bits:check_lanes_of_two_communicators", 2)


def check_far_sequences() -> None:
    for start in (1 << 31, 1 << 32, 1 << 63):
        member = Member(first_sequence=start - 5, one_shot_bytes=TWO_SHOT)
        for count in range(20):
            x = cancelling(member.world, 40 * count, "float32", seed=count)
            assert_bits_equal(member.all_reduce(x[member.rank])[0], tree_sum(x), f"call {count} from {start} - 5")
        member.close()


def test_sequences_pass_two_to_the_31_32_and_63(ranks: Ranks) -> None:
    ranks.run("test_ipc_bits:check_far_sequences", 2)
