"""Worlds 2, 4 and 8 on as few GPUs as there are: each rank a stream, all blocks resident.

Needs a GPU and the module built for it; skipped with that reason elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest
from gpu_support import MODULE, NO_GPU
from helpers import (
    CANARY_BITS,
    DTYPES,
    assert_bits_equal,
    bits,
    canary,
    cancelling,
    exactly_summable,
    numpy_dtype,
)

from jaxdp.collectives.operations import Operation
from jaxdp.tree import tree_sum

BLOCKS = 8  # of 512 threads a rank: eight ranks' blocks are resident together on one GPU
SIZES = (0, 1, 3, 7, 8, 9, 31, 33, 4097, 65537, 1 << 20)
DTYPE_CODE = {"float32": 0, "float16": 1, "bfloat16": 2}


pytestmark = pytest.mark.skipif(MODULE is None, reason=NO_GPU)


class Loopback:
    """A group of `world` ranks spread over the GPUs that are there."""

    def __init__(self, world: int, timeout_s: float = 5.0) -> None:
        self.devices = [rank % MODULE.device_count() for rank in range(world)]
        self.world = world
        self.handle = MODULE.create_local_group(self.devices, timeout_s, BLOCKS)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        MODULE.close_group(self.handle)

    def call(self, operation: Operation, lanes: list[np.ndarray], *, divisor: float | None = None,
             misalignment: int = 0, repeats: int = 1,
             signatures: list[str] | None = None) -> list[list[np.ndarray]]:
        """One call; lanes[i] is `dtype[world, n]`. Returns `[rank][lane]` flat arrays."""
        dtype = lanes[0].dtype if lanes else np.dtype(np.float32)
        inputs = [[lane[rank].tobytes() for lane in lanes] for rank in range(self.world)]
        names = signatures or [f"{operation.name} {[lane.shape for lane in lanes]} {dtype}"] * self.world
        results = MODULE.loopback_call(self.handle, self.devices, int(operation), DTYPE_CODE[dtype.name], inputs, names,
                                       divisor, misalignment, repeats)
        return [[np.frombuffer(lane, dtype) for lane in rank] for rank in results]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", (2, 4, 8))
def test_all_reduce_has_the_bits_of_tree_sum_at_every_size(world: int, dtype: str) -> None:
    with Loopback(world) as group:
        for size in SIZES:
            for make in (exactly_summable, cancelling, canary):
                lane = make(world, size, dtype)
                for rank, result in enumerate(group.call(Operation.ALL_REDUCE, [lane])):
                    assert_bits_equal(result[0], tree_sum(lane), f"size {size}, rank {rank}, {make.__name__}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", (4, 8))
def test_the_canary_gives_its_constant(world: int, dtype: str) -> None:
    with Loopback(world) as group:
        result = group.call(Operation.ALL_REDUCE, [canary(world, 4099, dtype)])
        assert {int(b) for rank in result for b in np.unique(bits(rank[0]))} == {CANARY_BITS[world, dtype]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", (2, 4, 8))
def test_reduce_scatter_and_all_gather(world: int, dtype: str) -> None:
    with Loopback(world) as group:
        for block in (0, 1, 5, 4099, 70001):
            lane = cancelling(world, world * block, dtype)
            scattered = group.call(Operation.REDUCE_SCATTER, [lane])
            total = tree_sum(lane).reshape(world, block)
            for rank in range(world):
                assert_bits_equal(scattered[rank][0], total[rank], f"reduce_scatter, block {block}")
            for result in group.call(Operation.ALL_GATHER, [lane]):
                assert_bits_equal(result[0], lane.reshape(-1), f"all_gather, block {block}")


@pytest.mark.parametrize("misalignment", (2, 4, 8))
def test_a_misaligned_array_has_the_same_bits(misalignment: int) -> None:
    with Loopback(4) as group:
        for dtype in ("float16", "bfloat16") if misalignment == 2 else DTYPES:
            lane = cancelling(4, 4099, dtype)
            for result in group.call(Operation.ALL_REDUCE, [lane], misalignment=misalignment):
                assert_bits_equal(result[0], tree_sum(lane))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_lanes_in_one_call_and_more_than_one_table(dtype: str) -> None:
    lanes = [cancelling(4, size, dtype, seed=size) for size in [*range(60), 5000, 1, 70000, *range(20)]]
    with Loopback(4) as group:
        for result in group.call(Operation.ALL_REDUCE, lanes):
            for lane, got in zip(lanes, result, strict=True):
                assert_bits_equal(got, tree_sum(lane))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_root_is_divided_once(dtype: str) -> None:
    lane = cancelling(4, 4099, dtype)
    with Loopback(4) as group:
        result = group.call(Operation.ALL_REDUCE, [lane], divisor=3.0)
    expected = (tree_sum(lane).astype(np.float32) / np.float32(3)).astype(numpy_dtype(dtype))
    for rank in result:
        assert_bits_equal(rank[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_canonical_and_subnormals_and_signed_zeros_are_kept(dtype: str) -> None:
    lane = np.zeros((4, 8), numpy_dtype(dtype))
    lane[1, 0] = np.nan
    lane[0, 1], lane[1, 1] = np.inf, -np.inf
    lane[0, 2] = np.inf
    lane[:, 3] = -0.0
    bits_of_lane = lane.view(f"u{lane.itemsize}")
    bits_of_lane[:, 4] = 1  # the smallest subnormal
    bits_of_lane[2, 5] |= {"float32": 0xFF812345, "float16": 0xFC81, "bfloat16": 0xFF81}[dtype]  # a NaN with payload
    with Loopback(4) as group:
        for rank in group.call(Operation.ALL_REDUCE, [lane]):
            assert_bits_equal(rank[0], tree_sum(lane))


def test_ten_thousand_calls_of_changing_size_stay_exact() -> None:
    sizes = (8, 4097, 3, 393217, 64)
    with Loopback(4, timeout_s=20) as group:
        for _ in range(20):
            for size in sizes:
                lane = canary(4, size, "bfloat16")
                for rank in group.call(Operation.ALL_REDUCE, [lane], repeats=100):
                    assert {int(b) for b in np.unique(bits(rank[0]))} == {0x4381}
        assert MODULE.group_calls(group.handle, 0) == 20 * len(sizes) * 100


def test_ranks_that_disagree_are_named_and_poison_the_group() -> None:
    with Loopback(2, timeout_s=2) as group:
        lane = canary(2, 64, "float32")
        with pytest.raises(RuntimeError, match="jaxdp.RankMismatch"):
            group.call(Operation.ALL_REDUCE, [lane], signatures=["all_reduce float32[64]", "all_reduce float32[8,8]"])
        with pytest.raises(RuntimeError, match="jaxdp.RankMismatch"):
            group.call(Operation.ALL_REDUCE, [lane])


def test_a_peer_that_never_comes_ends_in_the_named_error() -> None:
    with Loopback(4, timeout_s=1) as group:
        lane = canary(4, 64, "float32")
        alone = [0]
        with pytest.raises(RuntimeError, match=r"jaxdp.CollectiveTimeout: call 1: rank 0 waited .* for rank [123]"):
            MODULE.loopback_call(group.handle, alone, int(Operation.ALL_REDUCE), 0, [[lane[0].tobytes()]], ["x"], None,
                                 0, 1)
