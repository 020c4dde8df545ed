"""What the collectives refuse, at creation and at trace time, and what the refusal says."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, exactly_summable
from ranks import TRANSPORTS, Transport, open_collective, per_rank, reference

from jaxdp import DeterministicCollective, create_deterministic_collective
from jaxdp.errors import BadUse, CommunicatorClosed, ConfigError

REDUCTIONS = ("all_reduce", "reduce_scatter", "all_reduce_many", "reduce_scatter_many")


def call(collective: DeterministicCollective, operation: str, x: Any) -> Any:
    return getattr(collective, operation)([x] if operation.endswith("_many") else x)


@pytest.mark.parametrize("count", [0, 3, 5, 6, 7])
def test_a_world_that_is_not_a_small_power_of_two_is_refused_with_the_allowed_ones_named(count: int) -> None:
    with pytest.raises(ConfigError, match="1, 2, 4 or 8") as refusal:
        create_deterministic_collective(jax.devices()[:count])
    assert isinstance(refusal.value, BadUse)
    assert all(f"cpu:{i}" in str(refusal.value) for i in range(count))


def test_a_device_may_not_be_two_ranks() -> None:
    with pytest.raises(ConfigError, match="distinct"):
        create_deterministic_collective([jax.devices()[0]] * 2)


@pytest.mark.parametrize(("option", "value"), [
    ("transport", "nccl"), ("transport", None), ("transport", "LOCAL"),
    *(("timeout_s", value) for value in (0, -1.0, True, math.nan, math.inf, "3", None)),
    *(("capacity_bytes", value) for value in (0, -1, True, 1.5, "64", None)),
    *(("first_sequence", value) for value in (-1, 2**64, 1.5, "1")),
])
def test_an_option_outside_its_range_is_refused_by_name_and_value(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{option} must be .*{re.escape(repr(value))}"):
        create_deterministic_collective(jax.devices()[:2], **{option: value})


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("operation", REDUCTIONS)
def test_a_dtype_without_an_ieee_add_of_ours_is_refused_naming_it_and_the_allowed(
        operation: str, dtype: str, transport: Transport) -> None:
    with open_collective(2, transport) as collective:
        with pytest.raises(TypeError, match=rf"float32, float16, bfloat16.*\b{dtype}\b"):
            per_rank(lambda x: call(collective, operation, x.astype(dtype)), 2)(np.zeros((2, 4), np.float32))
        assert collective.calls(0) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("operation", REDUCTIONS)
def test_float64_is_refused_and_never_narrowed(operation: str, transport: Transport) -> None:
    with open_collective(2, transport) as collective, jax.enable_x64(True):
        with pytest.raises(TypeError, match=r"float32, float16, bfloat16.*\bfloat64\b"):
            per_rank(lambda x: call(collective, operation, x), 2)(np.zeros((2, 4)))
        assert_bits_equal(per_rank(collective.all_gather, 2)(np.ones((2, 1))), np.ones((2, 2)))


def test_one_bad_lane_refuses_the_whole_call() -> None:
    with open_collective(2) as collective:
        for many in (collective.all_reduce_many, collective.reduce_scatter_many):
            with pytest.raises(TypeError, match="int32"):
                per_rank(lambda x, many=many: many([x, x.astype(jnp.int32)]), 2)(np.zeros((2, 4), np.float32))
        assert collective.calls(0) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("operation", [*REDUCTIONS, "all_gather"])
def test_more_bytes_than_the_capacity_are_refused_with_both_numbers(operation: str, transport: Transport) -> None:
    with open_collective(2, transport, capacity_bytes=64) as collective:
        program = per_rank(lambda x: call(collective, operation, x), 2)
        with pytest.raises(ValueError, match=r"\b72\b.*\b64\b"):
            program(np.zeros((2, 18), np.float32))
        with pytest.raises(ValueError, match=r"\b68\b.*\b64\b"):
            program(np.zeros((2, 34), np.float16))
        x = exactly_summable(2, 16, "float32")
        [output] = jax.tree.leaves(program(x))
        assert_bits_equal(output, reference(operation.removesuffix("_many"), x), "exactly the capacity")


def test_the_capacity_holds_for_the_lanes_of_a_call_together() -> None:
    with open_collective(2, capacity_bytes=64) as collective:
        for many in (collective.all_reduce_many, collective.reduce_scatter_many):
            with pytest.raises(ValueError, match=r"\b72\b.*\b64\b"):
                per_rank(lambda x, many=many: many([x, x[:8]]), 2)(np.zeros((2, 10), np.float32))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shape", [(7,), (2, 4), (), (1,)])
@pytest.mark.parametrize("operation", ["reduce_scatter", "reduce_scatter_many"])
def test_a_leading_axis_that_the_world_does_not_divide_is_refused_with_both_numbers(
        operation: str, shape: tuple[int, ...], transport: Transport) -> None:
    with open_collective(4, transport) as collective, pytest.raises(ValueError, match=r"\b4\b") as refusal:
        per_rank(lambda x: call(collective, operation, x), 4)(np.zeros((4, *shape), np.float32))
    assert f"got shape {shape}" in str(refusal.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_gather_of_a_0d_array_is_refused(transport: Transport) -> None:
    with open_collective(4, transport) as collective, pytest.raises(ValueError, match=r"0-d.*\(1,\)"):
        per_rank(collective.all_gather, 4)(np.zeros(4, np.float32))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_refusal_at_trace_time_leaves_the_communicator_whole(transport: Transport) -> None:
    x = exactly_summable(4, 8, "float32")
    with open_collective(4, transport) as collective:
        with pytest.raises(TypeError):
            per_rank(lambda x: collective.all_reduce(collective.all_reduce(x).astype(jnp.int32)), 4)(x)
        collective.raise_if_failed()
        assert_bits_equal(per_rank(collective.all_reduce, 4)(x), reference("all_reduce", x))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("operation", [*REDUCTIONS, "all_gather", "barrier"])
def test_use_after_close_is_refused_when_traced(operation: str, transport: Transport) -> None:
    collective = open_collective(2, transport)
    collective.close()

    def body(x: Any) -> Any:
        if operation == "barrier":
            collective.barrier()
            return x
        return call(collective, operation, x)

    with pytest.raises(CommunicatorClosed, match="closed.*create a new one"):
        per_rank(body, 2)(np.zeros((2, 4), np.float32))
    with pytest.raises(CommunicatorClosed):
        collective.raise_if_failed()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_twice_does_nothing_the_second_time(transport: Transport) -> None:
    with open_collective(2, transport) as collective:
        per_rank(collective.all_reduce, 2)(np.zeros((2, 4), np.float32))
        collective.close()
        assert collective.close() is None
        with pytest.raises(CommunicatorClosed):
            collective.raise_if_failed()


def test_the_xla_transport_refuses_a_program_without_one_axis_of_its_world() -> None:
    with open_collective(4, "xla") as collective:
        with pytest.raises(ValueError, match=r"axis of size 4"):
            jax.jit(collective.all_reduce)(np.zeros(4, np.float32))
        with pytest.raises(ValueError, match=r"axis of size 4"):
            per_rank(collective.all_reduce, 2)(np.zeros((2, 4), np.float32))


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_gradient_that_shard_map_has_summed_is_not_summed_again(check_vma: bool) -> None:
    """Summed twice it would be world times too large: 12 in place of 6."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ranks",))
    replicated, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("ranks")
    with open_collective(2) as collective:
        def mean_gradient(parameter: Any, x: Any) -> Any:
            return collective.all_reduce(jax.grad(lambda p: (p * x).sum())(parameter))

        program = jax.jit(jax.shard_map(mean_gradient, mesh=mesh, in_specs=(replicated, split), out_specs=replicated,
                                        check_vma=check_vma))
        arguments = (np.float32(1), np.arange(4, dtype=np.float32))
        if not check_vma:
            assert program(*arguments) == 6
            return
        with pytest.raises(ValueError, match="check_vma=False"):
            program(*arguments)
