"""Digests are functions of values alone: no bucket plan, reducer of the tree or repetition moves a bit."""

from __future__ import annotations

import numpy as np
import pytest
from training_helpers import Record, config, linear_model, tiny_run

import jaxdp

KIB = 1 << 10


def digests(record: Record) -> list[tuple[str, str, float]]:
    return [(metrics.parameter_digest, metrics.gradient_digest, metrics.loss) for metrics in record.metrics]


@pytest.mark.parametrize("step_mode", ["fused", "staged"])
@pytest.mark.parametrize("change", [{"bucket_bytes": KIB}, {"reducer": "per-parameter"}, {"repeat": 1}],
                         ids=["buckets of 1 KiB", "per-parameter", "again"])
def test_no_bucket_plan_and_no_repetition_changes_a_bit(step_mode: str, change: dict[str, object]) -> None:
    usual, other = tiny_run(step_mode), tiny_run(step_mode, **change)  # type: ignore[arg-type]
    assert digests(other) == digests(usual)
    assert other.digest == usual.digest == usual.metrics[-1].parameter_digest


def test_the_bucket_plans_compared_are_different_ones() -> None:
    counts = [len(tiny_run(**fields).plan.buckets) for fields in (  # type: ignore[arg-type]
        {}, {"bucket_bytes": KIB}, {"reducer": "per-parameter"})]
    assert counts[0] == 1 < counts[1] < counts[2] == 12


def test_every_step_changes_both_digests() -> None:
    record = tiny_run()
    assert len({metrics.parameter_digest for metrics in record.metrics}) == 3
    assert len({metrics.gradient_digest for metrics in record.metrics}) == 3


@pytest.mark.parametrize("step_mode", ["fused", "staged"])
def test_the_parameter_digest_is_that_of_the_parameters(step_mode: str) -> None:
    record = tiny_run(step_mode)
    for metrics, ranks in zip(record.metrics, record.parameters, strict=True):
        assert metrics.parameter_digest == jaxdp.tree_digest(ranks[0])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("step_mode", ["fused", "staged"])
def test_exact_gradients_give_one_digest_at_every_world_size_and_step_mode(world: int, step_mode: str) -> None:
    model = linear_model({"a": [1.0, 2.0], "b": [-3.0, 0.5]})
    rows = [[0, 1], [1, 1], [0, 0], [1, 0]]
    batches = [{name: np.array(part, np.int32) for name in ("inputs", "targets")}
               for part in np.split(np.array(rows), world)]
    with jaxdp.DataParallelTrainer(model, seed=0, config=config(world, step_mode=step_mode)) as trainer:
        metrics = trainer.step(batches, 1)
    mean = {"a": np.float32(12 / 8), "b": np.float32(-10 / 8)}
    assert metrics.gradient_digest == jaxdp.tree_digest(mean)
