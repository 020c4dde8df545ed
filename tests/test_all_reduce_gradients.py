"""`all_reduce_gradients` is one sum and one division, leaf by leaf, whatever the plan or the reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import DTYPES, WORLD_SIZES, assert_bits_equal, assert_trees_bits_equal, bits, cancelling, numpy_dtype
from ranks import SPMD, TRANSPORTS, Spmd, open_collective, per_rank, reference

from jaxdp import PsumReducer, all_reduce_gradients, plan_buckets, tree_sum

REDUCERS = (*TRANSPORTS, "psum")
LIMIT = 25 << 20


@pytest.fixture(params=REDUCERS)
def reduced(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`reduced(grads, weight=None, limit=LIMIT, spmd="pmap")`: the mean on every rank; leaves are `[rank, ...]`."""
    opened = []

    def reducer(world_size: int) -> Any:
        if request.param == "psum":
            return PsumReducer("ranks", world_size)
        opened.append(open_collective(world_size, request.param))
        return opened[-1]

    def run(grads: Any, weight: Any = None, limit: int = LIMIT, spmd: Spmd = "pmap") -> Any:
        world_size = len(jax.tree.leaves(grads)[0])
        one_rank = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), grads)
        plan, chosen = plan_buckets(one_rank, limit), reducer(world_size)
        if weight is None:
            return per_rank(lambda g: all_reduce_gradients(g, plan, reducer=chosen), world_size, spmd)(grads)
        return per_rank(lambda g, w: all_reduce_gradients(g, plan, reducer=chosen, weight=w),
                        world_size, spmd)(grads, weight)

    yield run
    for collective in opened:
        collective.close()


def on_both_ranks(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.stack([leaf, leaf]), tree)


@pytest.mark.parametrize("spmd", SPMD)
def test_kinds_do_not_share_a_bucket_so_equal_ranks_get_back_what_they_gave(
        spmd: Spmd, reduced: Callable[..., Any]) -> None:
    tree = {
        "scalar": np.float32(1 + 2**-20),
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "vector": np.array([1.5, -2.25, 6e-8], np.float16),
        "large": np.float32(70000),
        "count": np.int32(2**31 - 1),
        "mask": np.array([True, False]),
    }
    mean = reduced(on_both_ranks(tree), spmd=spmd)
    assert_trees_bits_equal(mean, on_both_ranks(tree))
    assert bits(mean["scalar"]).tolist() == [0x3F800008] * 2
    assert mean["large"].tolist() == [70000.0] * 2


@pytest.mark.parametrize("limit", [1, 64, LIMIT])
def test_integers_and_bools_are_left_alone_though_the_ranks_differ(limit: int, reduced: Callable[..., Any]) -> None:
    grads = {"step": np.array([3, 5], np.int32), "mask": np.array([[True], [False]]),
             "x": np.array([[2.0], [4.0]], np.float32)}
    mean = reduced(grads, limit=limit)
    assert_trees_bits_equal(mean, {**grads, "x": np.array([[3.0], [3.0]], np.float32)})


def test_a_leaf_used_on_one_rank_of_four_is_divided_by_four(reduced: Callable[..., Any]) -> None:
    grads = {"u": np.array([8, 0, 0, 0], np.float32), "n": np.zeros(4, np.float32)}
    assert_trees_bits_equal(reduced(grads), {"u": np.full(4, 2, np.float32), "n": np.zeros(4, np.float32)})
    tokens = np.full(4, 16, np.int32)
    weighted = reduced({name: leaf * 16 for name, leaf in grads.items()}, tokens)
    assert_trees_bits_equal(weighted, {"u": np.full(4, 2, np.float32), "n": np.zeros(4, np.float32)})


@pytest.mark.parametrize("weight_dtype", [np.int32, np.float32])
@pytest.mark.parametrize("spmd", SPMD)
def test_unequal_tokens_weigh_the_mean(spmd: Spmd, weight_dtype: Any, reduced: Callable[..., Any]) -> None:
    """Tokens 3 and 1, local means 1 and 5: (3 * 1 + 1 * 5) / 4 = 2; the mean of means would be 3."""
    of_the_summed_loss = {"w": np.array([3 * 1.0, 1 * 5.0], np.float32)}
    mean = reduced(of_the_summed_loss, np.array([3, 1], weight_dtype), spmd=spmd)
    assert mean["w"].tolist() == [2.0, 2.0]


def test_a_rank_without_tokens_takes_part_with_weight_zero(reduced: Callable[..., Any]) -> None:
    mean = reduced({"w": np.array([3, 0, 5, 0], np.float32)}, np.array([1, 0, 1, 0], np.int32))
    assert mean["w"].tolist() == [4.0] * 4


@pytest.mark.parametrize("spmd", SPMD)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_tree_reducer_is_the_tree_then_one_division_in_float32(
        world_size: int, transport: Any, spmd: Spmd) -> None:
    grads = {dtype: cancelling(world_size, 33, dtype, seed) for seed, dtype in enumerate(DTYPES)}
    tokens = np.arange(3, 3 + world_size).astype(np.int32)
    plan = plan_buckets({dtype: jax.ShapeDtypeStruct((33,), numpy_dtype(dtype)) for dtype in DTYPES}, LIMIT)
    with open_collective(world_size, transport) as collective:
        plain, weighted = per_rank(lambda g, w: (
            all_reduce_gradients(g, plan, reducer=collective),
            all_reduce_gradients(g, plan, reducer=collective, weight=w)), world_size, spmd)(grads, tokens)
    for dtype, grad in grads.items():
        total = tree_sum(grad)
        for mean, divisor in ((plain, world_size), (weighted, tokens.sum())):
            once = (total.astype(np.float32) / np.float32(divisor)).astype(total.dtype)
            assert_bits_equal(mean[dtype], np.stack([once] * world_size), f"{dtype} / {divisor}")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_bucket_limit_changes_a_bit(transport: Any) -> None:
    grads = {f"layer{i}": cancelling(4, 7 + i, DTYPES[i % 3], i) for i in range(9)}
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), grads)
    plans = [plan_buckets(shapes, limit) for limit in (1, 48, LIMIT)]
    assert len({len(plan.buckets) for plan in plans}) == 3
    with open_collective(4, transport) as collective:
        by_plan = per_rank(lambda g: [all_reduce_gradients(g, plan, reducer=collective) for plan in plans], 4)(grads)
    for mean in by_plan[1:]:
        assert_trees_bits_equal(mean, by_plan[0])


def test_each_bucket_is_one_call_and_the_weight_one_more() -> None:
    grads = {f"layer{i}": np.ones((2, 8), np.float32) for i in range(6)}
    plan = plan_buckets(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((8,), leaf.dtype), grads), 64)
    assert len(plan.buckets) == 3
    with open_collective(2) as collective:
        per_rank(lambda g: all_reduce_gradients(g, plan, reducer=collective), 2)(grads)
        plain = collective.calls(0)
        per_rank(lambda g, w: all_reduce_gradients(g, plan, reducer=collective, weight=w), 2)(
            grads, np.ones(2, np.int32))
        assert (plain, collective.calls(0) - plain) == (3, 4)


def test_nested_trees_keep_their_structure_and_empty_leaves(reduced: Callable[..., Any]) -> None:
    grads = {"layers": [(np.ones((2, 3), np.float32), np.zeros((2, 0, 3), np.float32))], "none": None,
             "scale": np.array([1.0, 3.0], np.float32)}
    mean = reduced(grads)
    assert_trees_bits_equal(mean, {**grads, "scale": np.array([2.0, 2.0], np.float32)})


def test_psum_agrees_with_the_tree_where_sums_are_exact_and_within_rounding_elsewhere() -> None:
    exact = {"w": np.arange(4 * 12, dtype=np.float32).reshape(4, 12)}
    plan = plan_buckets({"w": jax.ShapeDtypeStruct((12,), jnp.float32)}, LIMIT)
    reduce = per_rank(lambda g: all_reduce_gradients(g, plan, reducer=PsumReducer("ranks", 4)), 4)
    assert_bits_equal(reduce(exact)["w"], reference("all_reduce", exact["w"]) / np.float32(4))
    rounded = {"w": cancelling(4, 12, "float32")}
    np.testing.assert_allclose(reduce(rounded)["w"], np.stack([rounded["w"].mean(0)] * 4), rtol=1e-5, atol=1e-5)


def test_a_plan_of_another_tree_is_refused() -> None:
    plan = plan_buckets({"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, LIMIT)
    with open_collective(2) as collective:
        for grads in ({"w": np.ones((2, 4), np.float32)}, {"v": np.ones((2, 3), np.float32)},
                      {"w": np.ones((2, 3), np.float16)}, {"w": np.ones((2, 3), np.float32), "x": np.ones((2, 1))}):
            with pytest.raises((ValueError, TypeError), match="plan"):
                per_rank(lambda g: all_reduce_gradients(g, plan, reducer=collective), 2)(grads)
