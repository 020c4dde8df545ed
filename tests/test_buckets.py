"""A bucket plan is greedy, deterministic, of one dtype a bucket, and covers each leaf once."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.buckets import BucketPlan, plan_buckets
from jaxdp.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20


def decoder_shapes(vocab: int, dim: int, layers: int, heads: int, kv_heads: int, ffn: int) -> list[tuple[int, ...]]:
    """The decoder's parameters in canonical order."""
    kv_dim = kv_heads * (dim // heads)
    layer = [(dim,), (dim, dim), (dim, kv_dim), (dim, kv_dim), (dim, dim), (dim,), (dim, ffn), (dim, ffn), (ffn, dim)]
    return [(vocab, dim), *layer * layers, (dim,), (dim, vocab)]


MODEL_S = decoder_shapes(vocab=8192, dim=384, layers=6, heads=6, kv_heads=6, ffn=832)
TINY = decoder_shapes(vocab=8, dim=8, layers=1, heads=2, kv_heads=1, ffn=16)


def structs(shapes: list[tuple[int, ...]], dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def sizes(plan: BucketPlan) -> list[int]:
    return [bucket.bytes for bucket in plan.buckets]


def indices(plan: BucketPlan) -> list[list[int]]:
    return [[leaf.index for leaf in bucket.leaves] for bucket in plan.buckets]


@pytest.mark.parametrize(("limit", "count"), [(1 * MIB, 45), (4 * MIB, 12), (25 * MIB, 3)])
def test_model_s_gives_its_bucket_counts(limit: int, count: int) -> None:
    plan = plan_buckets(structs(MODEL_S), limit)
    assert len(plan.buckets) == count
    assert (plan.parameter_count, plan.element_count) == (57, 15_586_176)


def test_model_s_at_25_mib_gives_its_three_sizes() -> None:
    assert sizes(plan_buckets(structs(MODEL_S), 25 * MIB)) == [26_156_544, 23_605_248, 12_582_912]


def test_tiny_is_one_bucket_at_4_kib() -> None:
    plan = plan_buckets(structs(TINY), 4 * KIB)
    assert (len(plan.buckets), plan.parameter_count, plan.element_count) == (1, 12, 728)


def test_a_bucket_closes_before_it_would_exceed_the_limit() -> None:
    leaves = structs([(2,), (2,), (1,), (4,)])
    assert indices(plan_buckets(leaves, 16)) == [[0, 1], [2], [3]]
    assert indices(plan_buckets(leaves, 15)) == [[0], [1, 2], [3]]


def test_a_leaf_above_the_limit_travels_alone_even_beside_empty_leaves() -> None:
    assert indices(plan_buckets(structs([(0,), (9,), (0,), (1,)]), 16)) == [[0], [1], [2, 3]]


def test_empty_and_0d_leaves_have_their_place() -> None:
    plan = plan_buckets(structs([(), (0, 3), (1,)]), 8)
    assert indices(plan) == [[0, 1, 2]]
    assert plan.buckets[0].offsets == (0, 1, 1)
    assert (plan.buckets[0].elements, plan.buckets[0].bytes) == (2, 8)
    assert plan_buckets({}, 8) == BucketPlan((), (), 8)


def test_each_bucket_has_one_dtype_and_other_dtypes_are_passed_through() -> None:
    tree = {"a_scalar": jnp.float32(1 + 2**-20), "b_matrix": jnp.ones((2, 3), jnp.bfloat16),
            "c_vector": jnp.ones(5, jnp.float16), "d_large": jnp.float32(70000), "e_count": jnp.int32(3),
            "f_mask": jnp.array([True]), "g_matrix": jnp.ones((4,), jnp.bfloat16), "h_wide": np.ones(2, np.float64)}
    plan = plan_buckets(tree, 25 * MIB)
    assert indices(plan) == [[0, 3], [1, 6], [2]]
    assert [bucket.dtype.name for bucket in plan.buckets] == ["float32", "bfloat16", "float16"]
    assert [bucket.index for bucket in plan.buckets] == [0, 1, 2]
    assert [(leaf.name, leaf.dtype.name) for leaf in plan.passed_through] == [
        ("e_count", "int32"), ("f_mask", "bool"), ("h_wide", "float64")]
    assert (plan.parameter_count, plan.element_count) == (5, 17)


def test_gradients_of_integer_leaves_are_passed_through() -> None:
    grads = jax.grad(lambda p: p["w"] * 2.0, allow_int=True)({"n": 3, "w": 1.0})
    plan = plan_buckets(grads, MIB)
    assert [leaf.name for leaf in plan.passed_through] == ["n"]
    assert [leaf.name for leaf in plan.buckets[0].leaves] == ["w"]


def test_buckets_are_ordered_by_their_first_leaf() -> None:
    leaves = [jax.ShapeDtypeStruct((4,), dtype) for dtype in (jnp.float16, jnp.float32, jnp.float16, jnp.float32)]
    assert indices(plan_buckets(leaves, 8)) == [[0], [1], [2], [3]]
    assert indices(plan_buckets(leaves, 16)) == [[0, 2], [1], [3]]


def test_equal_shapes_give_equal_plans_for_arrays_structs_and_tracers() -> None:
    arrays = {"q": jnp.ones((3, 4)), "k": jnp.ones(5, jnp.bfloat16)}
    plans: list[BucketPlan] = [plan_buckets(arrays, 16)]
    shapes = jax.eval_shape(lambda tree: plans.append(plan_buckets(tree, 16)) or tree, arrays)
    assert plans[0] == plans[1] == plan_buckets(shapes, 16)
    assert plans[0] != plan_buckets(shapes, 17)
    assert plans[0] != plan_buckets({"q": shapes["q"], "v": shapes["k"]}, 16)


def test_plans_are_frozen() -> None:
    plan = plan_buckets(structs(TINY), MIB)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.buckets[0].leaves = ()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("limit", [0, -1, True, 1.0, 2.5, "4", None])
def test_a_limit_that_is_no_positive_integer_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"maximum_bucket_bytes must be an integer of at least 1; got"):
        plan_buckets(structs(TINY), limit)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([jnp.float32, jnp.float16, jnp.int32])), max_size=30),
       st.integers(1, 100))
def test_every_plan_covers_each_leaf_once_in_order_and_could_not_be_packed_tighter(
        leaves: list[tuple[int, Any]], limit: int) -> None:
    plan = plan_buckets([jax.ShapeDtypeStruct((count,), dtype) for count, dtype in leaves], limit)
    covered = [i for bucket in indices(plan) for i in bucket] + [leaf.index for leaf in plan.passed_through]
    assert sorted(covered) == list(range(len(leaves)))
    for bucket in plan.buckets:
        assert [leaf.index for leaf in bucket.leaves] == sorted(leaf.index for leaf in bucket.leaves)
        assert {leaf.dtype for leaf in bucket.leaves} == {bucket.dtype}
        assert bucket.bytes <= limit or len(bucket.leaves) == 1
    for dtype in (np.float32, np.float16):
        own = [bucket for bucket in plan.buckets if bucket.dtype == dtype]
        assert all(b.bytes + c.leaves[0].bytes > limit for b, c in itertools.pairwise(own))


def test_the_table_names_each_bucket_and_each_leaf_passed_through() -> None:
    plan = plan_buckets({"w": jnp.ones((2, 3)), "x": jnp.ones(4), "n": jnp.int32(1)}, MIB)
    header, bucket, passed = str(plan).splitlines()
    assert header.split()[:3] == ["bucket", "dtype", "leaves"]
    assert bucket.split() == ["0", "float32", "2", "40", "w", "..", "x"]
    assert passed.split() == ["-", "int32", "1", "4", "n", "(passed", "through)"]
