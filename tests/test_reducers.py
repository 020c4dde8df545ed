"""Reducers keep their buckets in the compiled program, and every dtype and leaf as it is."""

from __future__ import annotations

import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bits_equal, assert_trees_bits_equal, canary, canary_sum
from training_helpers import batch_of, config, linear_model, rank_parameters, tiny_run

import jaxdp
from jaxdp.training.reduce import SEPARATE_BUCKETS, PsumReducer
from jaxdp.training.spmd import SpmdProgram

KIB = 1 << 10
SMALLEST_LEAF = 8  # elements, of tiny


def count_all_reduces(text: str) -> int:
    return len(re.findall(r" = .* all-reduce(?:-start)?\(", text))


def collective_operands(text: str) -> list[int]:
    """The number of operands of each collective call, less the order token."""
    calls = re.findall(r" custom-call\((.*?)\), custom_call_target=\"jaxdp_collective\"", text)
    return [operands.count("%") - 1 for operands in calls]


@pytest.mark.parametrize("bucket_bytes", [KIB, 25 << 20])
def test_psum_buckets_stay_apart_in_the_compiled_program(bucket_bytes: int) -> None:
    record = tiny_run("staged", "psum", "sgd", bucket_bytes=bucket_bytes)
    assert count_all_reduces(record.compiled_text) == len(record.plan.buckets)


def test_fused_psum_has_one_all_reduce_a_bucket() -> None:
    record = tiny_run("fused", "psum")
    assert count_all_reduces(record.compiled_text) == len(record.plan.buckets) == 1


@pytest.mark.parametrize(("options", "expected"), [(None, 1), (SEPARATE_BUCKETS["cpu"], 3)], ids=["plain", "separate"])
def test_xla_would_merge_the_buckets_if_it_were_not_told(options: dict[str, Any] | None, expected: int) -> None:
    reducer = PsumReducer("ranks", 2)

    def sums(x: Any) -> Any:
        return [reducer.sum_bucket([leaf])[0] for leaf in x]

    program = SpmdProgram(sums, jax.devices()[:2], compiler_options=options)
    x = [np.ones((2, n), np.float32) for n in (3, 5, 7)]
    program.prepare(None, x)
    assert count_all_reduces(program.compiled_text()[0]) == expected


@pytest.mark.parametrize("step_mode", ["fused", "staged"])
@pytest.mark.parametrize("change", [{}, {"bucket_bytes": KIB}, {"reducer": "per-parameter"}],
                         ids=["one", "several", "per-parameter"])
def test_the_tree_makes_one_call_a_bucket_and_one_gather(step_mode: str, change: dict[str, Any]) -> None:
    record = tiny_run(step_mode, **change)
    lanes = collective_operands(record.compiled_text)
    assert len(lanes) == len(record.plan.buckets) + 1
    assert sorted(lanes) == sorted([1, *(len(bucket.leaves) for bucket in record.plan.buckets)])


@pytest.mark.parametrize("change", [{}, {"bucket_bytes": KIB}], ids=["one", "several"])
def test_the_tree_copies_no_gradients_into_a_flat_bucket(change: dict[str, Any]) -> None:
    assert " concatenate(" not in tiny_run("staged", **change).compiled_text
    flat = re.findall(r"= f32\[(\d+)\]\S* concatenate\(", tiny_run("fused", **change).compiled_text)
    assert all(int(elements) < SMALLEST_LEAF for elements in flat)


def mixed_tree() -> dict[str, Any]:
    """Leaves of every kind, far below one bucket together; row 16's values."""
    return {"fine": np.float32(1 + 2**-20), "matrix": np.arange(6).reshape(2, 3).astype(jnp.bfloat16),
            "vector": np.array([1.5, -2.0, 0.25], np.float16), "large": np.array([70000.0], np.float32),
            "count": np.array([3, 2**31 - 1], np.int32), "flag": np.array([True, False])}


def reduced(tree: Any, world: int, reducer: Any, **fields: Any) -> list[Any]:
    """`all_reduce_gradients` in a user's own pmap: `tree` has a leading axis of ranks; each rank's result."""
    one = jax.tree.map(lambda leaf: leaf[0], tree)
    plan = jaxdp.plan_buckets(one, 1 << 20)

    def body(grads: Any, weight: Any) -> Any:
        chosen = {"weight": weight} if "weight" in fields else {}
        return jaxdp.all_reduce_gradients(grads, plan, reducer=reducer, **chosen)

    mapped = jax.pmap(body, axis_name="ranks", devices=jax.devices()[:world])
    result = jax.device_get(mapped(tree, np.asarray(fields.get("weight", np.ones(world)), np.float32)))
    return [jax.tree.map(operator.itemgetter(rank), result) for rank in range(world)]


def on_every_rank(tree: Any, world: int) -> Any:
    return jax.tree.map(lambda leaf: np.stack([leaf] * world), tree)


@pytest.mark.parametrize("weight", [None, 3.0], ids=["plain", "weighted"])
def test_the_mean_of_identical_leaves_is_unchanged_in_every_dtype(weight: float | None) -> None:
    tree = mixed_tree()
    grads = tree
    fields: dict[str, Any] = {}
    if weight is not None:
        # Gradients of a sum over `weight` tokens, in a dtype that holds three times the value exactly.
        grads = {name: (leaf * np.asarray(3, leaf.dtype)) if leaf.dtype.kind not in "ib" else leaf
                 for name, leaf in tree.items() if name in ("matrix", "vector", "large", "count", "flag")}
        tree = {name: tree[name] for name in grads}
        fields = {"weight": [weight, weight]}
    with jaxdp.create_deterministic_collective(jax.devices()[:2]) as collective:
        for rank in reduced(on_every_rank(grads, 2), 2, collective, **fields):
            assert_trees_bits_equal(rank, jax.tree.map(np.asarray, tree))


def test_a_bucket_holds_one_dtype_and_integers_and_booleans_are_passed_through_by_name() -> None:
    plan = jaxdp.plan_buckets(mixed_tree(), 1 << 20)
    assert [{leaf.dtype.name for leaf in bucket.leaves} for bucket in plan.buckets] == [
        {"float32"}, {"bfloat16"}, {"float16"}]
    assert [leaf.name for leaf in plan.passed_through] == ["count", "flag"]


def test_psum_keeps_dtypes_and_passes_integers_through() -> None:
    tree = mixed_tree()
    for rank in reduced(on_every_rank(tree, 2), 2, PsumReducer("ranks", 2)):
        assert_trees_bits_equal(rank, jax.tree.map(np.asarray, tree))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients_are_summed_by_the_balanced_tree_then_divided_once(dtype: str) -> None:
    x = canary(4, 33, dtype)
    with jaxdp.create_deterministic_collective(jax.devices()[:4]) as collective:
        ranks = reduced({"w": x}, 4, collective)
    expected = (canary_sum(4, 33, dtype).astype(np.float32) / np.float32(4)).astype(x.dtype)
    for rank in ranks:
        assert_bits_equal(rank["w"], expected)


@pytest.mark.parametrize("reducer", ["tree", "psum"])
def test_a_weighted_mean_divides_the_sums_by_the_summed_weight(reducer: str) -> None:
    sums = {"w": np.array([[3 * 1.0], [1 * 5.0]], np.float32)}
    with jaxdp.create_deterministic_collective(jax.devices()[:2]) as collective:
        chosen: Any = collective if reducer == "tree" else PsumReducer("ranks", 2)
        ranks = reduced(sums, 2, chosen, weight=[3, 1])
    assert [rank["w"].tolist() for rank in ranks] == [[2.0], [2.0]]


def unused_model() -> jaxdp.Model:
    """`u` has gradient 8 where the token is 1 and 0 where it is 0; `n` is used by nobody."""
    return linear_model({"u": [0.0, 8.0], "n": [0.0, 0.0]})


ONE_RANK_USES_IT = [batch_of([[1]]), batch_of([[0]]), batch_of([[0]]), batch_of([[0]])]


@pytest.mark.parametrize("reducer", ["tree", "psum", "per-parameter"])
def test_a_leaf_that_one_rank_uses_is_averaged_over_all(reducer: str) -> None:
    settings = config(4, reducer=reducer, optimizer=optax.sgd(1.0))
    with jaxdp.DataParallelTrainer(unused_model(), seed=0, config=settings) as trainer:
        metrics = trainer.step(ONE_RANK_USES_IT, 1)
        assert metrics.gradient_norm == 2.0
        for rank in rank_parameters(trainer):
            assert (float(rank["u"]), float(rank["n"])) == (1.0 - 2.0, 1.0)


@pytest.mark.parametrize("step_mode", ["fused", "staged"])
def test_a_leaf_that_nobody_uses_still_decays(step_mode: str) -> None:
    settings = config(4, step_mode=step_mode, optimizer=jaxdp.AdamWConfig(learning_rate=1e-3, weight_decay=0.1))
    with jaxdp.DataParallelTrainer(unused_model(), seed=0, config=settings) as trainer:
        trainer.step(ONE_RANK_USES_IT, 1)
        ranks = rank_parameters(trainer)
    assert float(ranks[0]["n"]) == pytest.approx(0.9999, abs=1.2e-7)
    for rank in ranks:
        assert_trees_bits_equal(rank, ranks[0])


def test_momentum_moves_a_leaf_after_its_gradient_has_gone() -> None:
    model = linear_model({"p": [0.1, 0.0]})
    with jaxdp.DataParallelTrainer(model, seed=0, config=config(2)) as trainer:
        values = []
        for step, token in ((1, 0), (2, 1)):
            trainer.step([batch_of([[token]])] * 2, step)
            values.append([float(rank["p"]) for rank in rank_parameters(trainer)])
    assert values[0] == pytest.approx([0.9990000001] * 2, abs=1.2e-7)
    assert values[1] == pytest.approx([0.9983299419] * 2, abs=1.2e-7)
