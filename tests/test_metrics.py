"""A step's record holds every promised field, true where it is known and None where it is not."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import pytest
from training_helpers import Record, batch_of, config, linear_model, tiny_run

import jaxdp

PROMISED = {"step", "loss", "rank_losses", "tokens", "rank_tokens", "learning_rate", "gradient_norm", "bucket_count",
            "parameter_count", "element_count", "forward_backward_ms", "communication_ms", "optimizer_ms",
            "verification_ms", "total_ms", "parameter_check", "maximum_parameter_difference", "gradient_digest",
            "parameter_digest", "peak_device_bytes"}
STAGES = ("forward_backward_ms", "communication_ms", "optimizer_ms")
MODEL = linear_model({"p": [1.0, 5.0]})
BATCHES = [batch_of([[0, 0, 0]]), batch_of([[1, -1, -1]])]


@pytest.fixture(scope="module", params=["fused", "staged"])
def trainer(request: pytest.FixtureRequest) -> Iterator[jaxdp.DataParallelTrainer]:
    settings = config(2, step_mode=request.param, uneven_inputs="token-weighted", optimizer=optax.sgd(0.5))
    with jaxdp.DataParallelTrainer(MODEL, seed=0, config=settings) as trainer:
        yield trainer


@pytest.fixture(scope="module", params=["fused", "staged"])
def record(request: pytest.FixtureRequest) -> Record:
    return tiny_run(request.param)


def test_the_record_is_frozen_and_holds_every_promised_field(record: Record) -> None:
    metrics = record.metrics[0]
    assert {field.name for field in dataclasses.fields(metrics)} >= PROMISED
    with pytest.raises(dataclasses.FrozenInstanceError):
        metrics.loss = 0.0  # type: ignore[misc]


def test_values_are_plain_python_numbers_and_text(record: Record) -> None:
    """So that they go into JSON as they are: no NumPy scalar, no array."""
    def leaves(value: Any) -> Any:
        return itertools.chain.from_iterable(map(leaves, value)) if isinstance(value, tuple) else [value]

    for metrics in record.metrics:
        for field in dataclasses.fields(metrics):
            for leaf in leaves(getattr(metrics, field.name)):
                assert type(leaf) in (int, float, str, type(None)), field.name


def test_counts_are_those_of_the_model_and_plan(record: Record) -> None:
    for step, metrics in enumerate(record.metrics, 1):
        assert (metrics.bucket_count, metrics.parameter_count, metrics.element_count) == (1, 12, 728)
        assert metrics.step == step
        assert (metrics.tokens, metrics.rank_tokens) == (16, (8, 8))
        assert metrics.learning_rate == np.float32(5e-3)


def test_digests_are_64_hex_digits(record: Record) -> None:
    for metrics in record.metrics:
        for digest in (metrics.gradient_digest, metrics.parameter_digest):
            assert len(digest) == 64
            assert set(digest) <= set("0123456789abcdef")


def test_peak_memory_is_none_where_the_backend_does_not_say(record: Record) -> None:
    for metrics in record.metrics:
        assert metrics.peak_device_bytes is None  # CPU; 0 would be a guess


def test_a_fused_step_knows_no_stage_and_a_staged_one_all() -> None:
    for metrics in tiny_run("fused").metrics:
        assert [getattr(metrics, stage) for stage in STAGES] == [None] * 3
    for metrics in tiny_run("staged").metrics:
        assert all(getattr(metrics, stage) > 0 for stage in STAGES)


def test_stage_times_add_up_to_no_more_than_the_total(record: Record) -> None:
    for metrics in record.metrics:
        known = [getattr(metrics, name) or 0.0 for name in (*STAGES, "verification_ms")]
        assert sum(known) <= metrics.total_ms * (1 + 1e-12)
        assert metrics.verification_ms is not None
        assert metrics.total_ms > 0


def test_compiling_is_reported_apart_and_once(record: Record) -> None:
    assert record.metrics[0].compile_ms is not None
    assert record.metrics[0].compile_ms > 0
    assert [metrics.compile_ms for metrics in record.metrics[1:]] == [None, None]


def test_the_loss_is_the_sum_over_all_tokens_and_not_the_mean_of_means(trainer: jaxdp.DataParallelTrainer) -> None:
    ones = {name: np.ones_like(x) for name, x in trainer.state_tensors().items()}
    trainer.load_state_tensors(ones, 0)
    metrics = trainer.step(BATCHES, 1)
    assert (metrics.loss, metrics.rank_losses, metrics.rank_tokens) == (2.0, (1.0, 5.0), (3, 1))
    weighted = sum(loss * tokens for loss, tokens in zip(metrics.rank_losses, metrics.rank_tokens, strict=True)
                   if loss is not None)
    assert metrics.loss == weighted / metrics.tokens


def test_the_loss_is_that_of_the_parameters_before_the_update(trainer: jaxdp.DataParallelTrainer) -> None:
    ones = {name: np.ones_like(x) for name, x in trainer.state_tensors().items()}
    trainer.load_state_tensors(ones, 0)
    assert [trainer.step(BATCHES, step).loss for step in (1, 2)] == [2.0, 0.0]  # p: 1, then 1 - 0.5 * 2


def test_the_gradient_digest_is_that_of_the_mean_gradient(trainer: jaxdp.DataParallelTrainer) -> None:
    assert trainer.step(BATCHES, 1).gradient_digest == jaxdp.tree_digest({"p": np.float32(2.0)})


def test_a_wall_clock_set_back_changes_no_duration(trainer: jaxdp.DataParallelTrainer,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    backwards = itertools.count(int(time.time()), -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(backwards)))
    monkeypatch.setattr(time, "time_ns", lambda: next(backwards) * 10**9)
    metrics = trainer.step(BATCHES, 1)
    durations = [getattr(metrics, name) for name in (*STAGES, "verification_ms", "total_ms")]
    assert all(0 <= duration < 3.6e6 / 2 for duration in durations if duration is not None)
