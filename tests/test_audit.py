"""The rank audit sees every bit that differs, says where, and never calls a skipped check passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import bits
from training_helpers import batch_of, config, linear_model

import jaxdp
from jaxdp.errors import ParameterMismatch

WORLD = 4
BATCHES = [batch_of([[0]])] * WORLD
NAN, OTHER_NAN = 0x7FC00000, 0x7FC00001


def make_trainer(step_mode: str, interval: int) -> jaxdp.DataParallelTrainer:
    """`spare` and `unused` stay as they are; `used` moves by -1/4 a step."""
    model = linear_model({"spare": [0.0], "unused": [0.0], "used": [0.25]}, initial=2.0)
    settings = config(WORLD, step_mode=step_mode, parameter_check_interval=interval, optimizer=optax.sgd(1.0))
    return jaxdp.DataParallelTrainer(model, seed=0, config=settings)


@pytest.fixture(scope="module", params=["fused", "staged"])
def shared(request: pytest.FixtureRequest) -> Iterator[jaxdp.DataParallelTrainer]:
    with make_trainer(request.param, 1) as trainer:
        yield trainer


@pytest.fixture
def trainer(shared: jaxdp.DataParallelTrainer) -> jaxdp.DataParallelTrainer:
    """A trainer whose ranks all hold spare 0, unused 2 and used 2."""
    values = {"parameters/spare": 0, "parameters/unused": 2, "parameters/used": 2}
    state = {name: np.full_like(x, values.get(name, 0)) for name, x in shared.state_tensors().items()}
    shared.load_state_tensors(state, 0)
    return shared


def edit(trainer: jaxdp.DataParallelTrainer, rank: int, leaf: str, change: Callable[[np.ndarray], Any]) -> None:
    """Replaces the bits of one leaf on one rank by `change(bits)`."""
    rows = list(trainer._step.rows)
    old = rows[rank].parameters[leaf]
    new = np.asarray(change(bits(old)), np.uint32).view(np.float32)
    parameters = rows[rank].parameters | {leaf: jax.device_put(new, trainer.devices[rank])}
    rows[rank] = rows[rank]._replace(parameters=parameters)
    trainer._step.load(rows)


def failure(trainer: jaxdp.DataParallelTrainer, step: int = 1) -> ParameterMismatch:
    with pytest.raises(ParameterMismatch) as caught:
        trainer.step(BATCHES, step)
    return caught.value


def test_ranks_that_agree_are_reported_ok(trainer: jaxdp.DataParallelTrainer) -> None:
    metrics = trainer.step(BATCHES, 1)
    assert (metrics.parameter_check, metrics.maximum_parameter_difference) == ("ok", 0.0)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("flipped", [0, 22, 30, 31], ids="bit {}".format)
def test_one_flipped_bit_is_a_mismatch_that_names_leaf_and_rank(trainer: jaxdp.DataParallelTrainer, rank: int,
                                                                flipped: int) -> None:
    edit(trainer, rank, "unused", lambda old: old ^ np.uint32(1 << flipped))
    error = failure(trainer)
    assert "'unused'" in str(error)
    assert f"rank {rank}" in str(error)
    assert "step 1" in str(error)
    assert error.metrics.parameter_check == "mismatch"
    assert error.metrics.step == 1


def test_a_sign_of_zero_is_a_mismatch_although_the_values_are_equal(trainer: jaxdp.DataParallelTrainer) -> None:
    edit(trainer, 2, "spare", lambda old: old ^ np.uint32(1 << 31))
    error = failure(trainer)
    assert "'spare' of rank 2" in str(error)
    assert error.metrics.maximum_parameter_difference == 0.0


def test_nans_of_one_payload_agree_and_of_two_do_not(trainer: jaxdp.DataParallelTrainer) -> None:
    for rank in range(WORLD):
        edit(trainer, rank, "spare", lambda old: np.full_like(old, NAN))
    assert trainer.step(BATCHES, 1).parameter_check == "ok"
    edit(trainer, 2, "spare", lambda old: np.full_like(old, OTHER_NAN))
    error = failure(trainer)
    assert "'spare' of rank 2" in str(error)
    assert error.metrics.parameter_check == "mismatch"


def test_a_nan_on_one_rank_alone_is_a_mismatch(trainer: jaxdp.DataParallelTrainer) -> None:
    edit(trainer, 1, "spare", lambda old: np.full_like(old, NAN))
    assert "'spare' of rank 1" in str(failure(trainer))


def test_the_first_leaf_in_canonical_order_and_there_the_first_rank_are_named(
        trainer: jaxdp.DataParallelTrainer) -> None:
    edit(trainer, 1, "used", lambda old: old ^ np.uint32(1 << 29))
    edit(trainer, 3, "unused", lambda old: old ^ np.uint32(1))
    edit(trainer, 2, "unused", lambda old: old ^ np.uint32(1))
    assert "'unused' of rank 2" in str(failure(trainer))


def test_a_rank_0_that_differs_from_all_others_is_a_mismatch(trainer: jaxdp.DataParallelTrainer) -> None:
    edit(trainer, 0, "unused", lambda old: old ^ np.uint32(1))
    assert failure(trainer).metrics.parameter_check == "mismatch"


def test_the_largest_difference_is_reported(trainer: jaxdp.DataParallelTrainer) -> None:
    one = np.float32(1).view(np.uint32)
    edit(trainer, 1, "used", lambda old: np.full_like(old, one))
    edit(trainer, 3, "unused", lambda old: np.full_like(old, np.float32(1.5).view(np.uint32)))
    error = failure(trainer)
    assert error.metrics.maximum_parameter_difference == 1.0
    assert "'unused' of rank 3" in str(error)


def test_a_mismatch_is_found_again_until_it_is_mended(trainer: jaxdp.DataParallelTrainer) -> None:
    good = {name: x.copy() for name, x in trainer.state_tensors().items()}
    edit(trainer, 3, "unused", lambda old: old ^ np.uint32(1))
    assert failure(trainer, 1).metrics.step == 1
    assert failure(trainer, 2).metrics.step == 2
    trainer.load_state_tensors(good, 0)
    assert trainer.step(BATCHES, 3).parameter_check == "ok"


def test_a_difference_in_the_middle_of_a_leaf_is_found() -> None:
    from jaxdp.training.audit import Auditor

    clean = {"w": np.arange(2 * 5 * 7, dtype=np.float32).reshape(2, 5, 7)}
    broken = {"w": clean["w"].copy()}
    broken["w"][1, 2, 3] = -broken["w"][1, 2, 3]
    devices = jax.devices()[:2]
    auditor = Auditor(clean, devices)
    rows = [jax.tree.map(lambda x, d=device: jax.device_put(x[None], d), tree)
            for tree, device in zip((clean, broken), devices, strict=True)]
    mismatch = auditor.mismatch(rows, auditor.fingerprints(rows))
    assert mismatch is not None
    assert (mismatch.leaf, mismatch.rank, mismatch.maximum_difference) == ("w", 1, 2 * clean["w"][1, 2, 3])


@pytest.mark.parametrize("step_mode", ["fused", "staged"])
@pytest.mark.parametrize(("interval", "checked"), [(0, []), (3, [3, 6])])
def test_steps_that_the_interval_leaves_out_are_skipped_and_never_ok(step_mode: str, interval: int,
                                                                    checked: list[int]) -> None:
    with make_trainer(step_mode, interval) as trainer:
        reports = [trainer.step(BATCHES, step) for step in range(1, 7)]
        assert [report.step for report in reports if report.parameter_check == "ok"] == checked
        for report in reports:
            assert report.parameter_check in ("ok", "skipped")
            assert (report.maximum_parameter_difference is None) == (report.parameter_check == "skipped")
        edit(trainer, 1, "unused", lambda old: old ^ np.uint32(1))
        blind = trainer.step(BATCHES, 7)
        assert (blind.parameter_check, blind.maximum_parameter_difference) == ("skipped", None)
        if interval:
            assert "rank 1" in str(failure(trainer, 9))
