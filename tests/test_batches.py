"""Batches by cursor: each sample once an epoch, the same at every world size, none lost in evaluation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from helpers import WORLD_SIZES, assert_bits_equal
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.data import BatchSource, Corpus, EvaluationBatches, RampCorpus, check_token_ids, mean_loss
from jaxdp.data.permutation import permute
from jaxdp.errors import ConfigError, DataError


def corpus(windows: int, context: int = 4) -> Corpus:
    """A corpus whose window w starts with token w * context."""
    return Corpus("numbers", np.arange(windows * context + 1, dtype=np.int32), "", "tokens")


def source(windows: int, sequences: Any = 2, **changes: Any) -> BatchSource:
    return BatchSource(**({"corpus": corpus(windows), "context": 4, "sequences": sequences, "seed": 5} | changes))


def windows_of(batches: list[Any]) -> list[int]:
    return [int(row[0]) // 4 for batch in batches for row in batch["inputs"]]


# Shuffling.

@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
def test_a_shuffle_is_a_permutation_at_every_size(size: int, seed: int, epoch: int) -> None:
    images = permute(np.arange(size), size=size, seed=seed, epochs=np.full(size, epoch))
    assert sorted(images.tolist()) == list(range(size))


def test_shuffles_differ_between_epochs_and_seeds_and_stay_the_same_for_good() -> None:
    orders = {(seed, epoch): tuple(permute(np.arange(50), size=50, seed=seed, epochs=np.full(50, epoch)).tolist())
              for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert orders[0, 0][:8] == (1, 22, 4, 30, 3, 44, 28, 27)  # fixed for good: a change here changes every shuffled run


def test_a_shuffle_leaves_no_trace_of_the_order() -> None:
    images = permute(np.arange(4096), size=4096, seed=1, epochs=np.zeros(4096, np.int64))
    assert abs(np.corrcoef(np.arange(4096), images)[0, 1]) < 0.05
    assert np.mean(np.diff(images) == 1) < 0.01


# Training batches.

def test_a_batch_is_int32_inputs_and_the_next_tokens() -> None:
    batch = source(10, shuffle=False).batch(3)
    assert batch["inputs"].tolist() == [[12, 13, 14, 15], [16, 17, 18, 19]]
    assert batch["targets"].tolist() == [[13, 14, 15, 16], [17, 18, 19, 20]]
    assert {array.dtype.name for array in batch.values()} == {"int32"}


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_window_is_used_once_an_epoch_also_across_batches_that_straddle_epochs(shuffle: bool) -> None:
    data = source(7, sequences=3, shuffle=shuffle)
    used = [window for step in range(1, 8) for window in windows_of(data.global_batch(step, 1))]
    assert [sorted(used[start:start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert (used[:7] == used[7:14]) is not shuffle


@pytest.mark.parametrize("worlds", [(8, 2, 4, 1), (1, 8), (2, 2, 2)])
def test_changing_the_world_repeats_and_skips_nothing(worlds: tuple[int, ...]) -> None:
    data, cursor, used = source(30), 0, []
    for world in worlds:
        used += windows_of(data.batches(cursor, world))
        cursor = data.cursor_after(cursor, world)
    assert used == data.window_indices(0, cursor).tolist()


def test_parts_are_contiguous_slices_of_the_global_batch() -> None:
    data = source(40)
    for step in (1, 2, 9):
        together = data.window_indices((step - 1) * 8, 8).tolist()
        assert windows_of(data.global_batch(step, 4)) == together
        assert windows_of([data.batch((step - 1) * 8 + 2 * 3)]) == together[6:]


def test_step_eleven_after_a_stop_uses_the_batch_that_follows_step_ten() -> None:
    data = source(1000)
    whole = [windows_of(data.global_batch(step, 2)) for step in range(1, 21)]
    cursor = 0
    for _ in range(10):
        cursor = data.cursor_after(cursor, 2)
    resumed = source(1000)
    assert windows_of(resumed.batches(cursor, 2)) == whole[10]
    assert len({window for step in whole for window in step}) == 20 * 4


def test_a_far_cursor_costs_no_more_than_a_near_one_and_repeats_its_bits() -> None:
    data = source(11)
    far = data.batch(10**15 + 3)
    assert_bits_equal(far["inputs"], source(11).batch(10**15 + 3)["inputs"])
    assert set(windows_of([far])) <= set(range(11))


def test_the_ramp_read_in_order_gives_rank_r_the_first_system_s_stream() -> None:
    data = BatchSource(corpus=RampCorpus(8192), context=32, sequences=1, shuffle=False)
    for rank, batch in enumerate(data.global_batch(1, 4)):
        assert batch["inputs"].tolist() == [[(97 * rank + 13 * i + 7) % 8192 for i in range(32)]]


@pytest.mark.parametrize(("field", "value"), [
    ("context", 0), ("sequences", 0), ("sequences", True), ("sequences", 2.0), ("seed", -1), ("shuffle", 1)])
def test_a_field_that_is_not_allowed_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .*{value!r}"):
        source(10, **{field: value})


@pytest.mark.parametrize("make", [BatchSource, EvaluationBatches])
def test_data_shorter_than_a_context_and_its_last_target_is_refused_with_both_numbers(make: Any) -> None:
    short = dataclasses.replace(corpus(1), tokens=np.arange(4, dtype=np.uint8))
    with pytest.raises(DataError, match="'numbers' holds 4 tokens and one context of 4 tokens needs 5"):
        make(corpus=short, context=4, sequences=1)
    assert make(corpus=corpus(1), context=4, sequences=1).batch(0)["inputs"].tolist() == [[0, 1, 2, 3]]


# Evaluation.

def evaluated(windows: int, sequences: int, world: int) -> tuple[list[int], float, list[int]]:
    """Windows that count, their mean loss when window w costs LOSSES[w] a token, and each rank's calls."""
    data = EvaluationBatches(corpus=corpus(windows), context=4, sequences=sequences)
    seen, sums, weights, calls = [], [], [], [0] * world
    for step in range(data.step_count(world)):
        for rank, batch in enumerate(data.batches(step, world)):
            assert batch["inputs"].shape == batch["targets"].shape == (sequences, 4)
            rows = [int(row[0]) // 4 for row, target in zip(batch["inputs"], batch["targets"], strict=True)
                    if np.any(target != -1)]
            seen += rows
            calls[rank] += 1
            sums.append(sum(4 * LOSSES[row] for row in rows))
            weights.append(np.count_nonzero(batch["targets"] != -1))
    return sorted(seen), mean_loss(sums, weights), calls


LOSSES = (1.0, 2.0, 3.0, 4.0, 10.0)


@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("sequences", [1, 2, 4])
@pytest.mark.parametrize("windows", [5, 3, 1])
def test_every_sample_counts_once_at_every_world_size_and_all_ranks_take_part(
        windows: int, sequences: int, world: int) -> None:
    seen, mean, calls = evaluated(windows, sequences, world)
    assert seen == list(range(windows))
    assert mean == sum(LOSSES[:windows]) / windows  # 4.0 for five: a repeated sample would give 3.5
    assert len(set(calls)) == 1


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_what_a_batch_holds_does_not_depend_on_the_world_size(world: int) -> None:
    data = EvaluationBatches(corpus=corpus(5), context=4, sequences=2)
    batches = [batch for step in range(data.step_count(world)) for batch in data.batches(step, world)]
    assert len(batches) >= len(data) == 3
    for index, batch in enumerate(batches):
        for field, array in data.batch(index).items():
            assert_bits_equal(batch[field], array)


def test_the_mean_loss_does_not_depend_on_order_or_grouping() -> None:
    sums = np.ldexp(np.random.default_rng(0).standard_normal(999), np.arange(999) % 40)
    means = {mean_loss(sums[order], np.ones(999)) for order in (slice(None), slice(None, None, -1), np.argsort(sums))}
    assert len(means) == 1
    assert math.isnan(mean_loss([0.0], [0.0]))


# Ids outside the vocabulary.

def good_batch() -> dict[str, np.ndarray]:
    return {"inputs": np.array([[0, 7], [3, 4]], np.int32), "targets": np.array([[7, -1], [0, 5]], np.int32)}


def test_ids_inside_the_vocabulary_and_ignored_targets_pass() -> None:
    check_token_ids([good_batch(), good_batch()], 8)
    empty = {"inputs": np.zeros((0, 4), np.int32), "targets": np.zeros((0, 4), np.int32)}
    check_token_ids([empty], 8)


@pytest.mark.parametrize(("field", "bad"), [("inputs", 8), ("inputs", -1), ("targets", 8), ("targets", -2)])
@pytest.mark.parametrize("first_rank", [0, 6])
def test_an_id_outside_the_vocabulary_names_rank_sample_position_id_and_vocabulary(
        field: str, bad: int, first_rank: int) -> None:
    batches = [good_batch(), good_batch()]
    batches[1][field][1, 0] = bad
    message = (f"rank {first_rank + 1}, sample 1, position 0: {field} has token id {bad}, "
               "outside the vocabulary of 8")
    with pytest.raises(DataError, match=message):
        check_token_ids(batches, 8, first_rank=first_rank)


@pytest.mark.parametrize(("change", "message"), [
    ({"inputs": np.zeros((2, 2))}, "rank 0 has inputs of dtype float64"),
    ({"targets": np.zeros((2, 2), bool)}, "rank 0 has targets of dtype bool"),
    ({"inputs": np.zeros((2, 3), np.int32)}, r"inputs of shape \(2, 3\) and targets of shape \(2, 2\)"),
    ({"inputs": np.zeros(2, np.int32), "targets": np.zeros(2, np.int32)}, r"inputs of shape \(2,\)"),
])
def test_a_batch_of_another_form_is_refused(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_token_ids([good_batch() | change], 8)
    with pytest.raises(DataError, match="rank 0 has a batch without 'targets'"):
        check_token_ids([{"inputs": good_batch()["inputs"]}], 8)
