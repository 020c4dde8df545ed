"""Collectives inside a user's program: views, dead results, loops, branches, nesting, and one order for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, cancelling, exactly_summable, run_python
from jax import lax
from ranks import OPERATIONS, SPMD, TRANSPORTS, Spmd, Transport, open_collective, per_rank, reference

from jaxdp import DeterministicCollective, create_deterministic_collective

WORLD = 4
VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: x.T,
    "every second column": lambda x: x[:, ::2],
    "reversed": lambda x: x[::-1, ::-1],
    "from the third column": lambda x: x[:, 3:],
}

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def calls(collective: DeterministicCollective) -> list[int]:
    return [collective.calls(rank) for rank in range(collective.world_size)]


def run(transport: Transport, body: Callable[[DeterministicCollective, Any], Any], x: Any, expected_calls: int,
        world_size: int = WORLD) -> Any:
    """The outputs of `body(collective, x[rank])` on every rank, having checked how many calls each rank made."""
    with open_collective(world_size, transport) as collective:
        outputs = per_rank(lambda local: body(collective, local), world_size)(x)
        if transport == "local":  # the xla transport does not count
            assert calls(collective) == [expected_calls] * world_size
    return outputs


def row(x: np.ndarray) -> np.ndarray:
    return reference("all_reduce", x)


@pytest.fixture
def x() -> np.ndarray:
    return cancelling(WORLD, 8, "float32")


@pytest.mark.parametrize("spmd", [*SPMD, "eager"])
def test_a_transposed_view_is_reduced_gathered_and_scattered_as_it_reads(spmd: Any, transport: Transport) -> None:
    first = np.arange(8, dtype=np.float32).reshape(2, 4)
    x = np.stack([first, first + 100])
    with open_collective(2, transport) as collective, jax.disable_jit(spmd == "eager"):
        total, gathered, scattered = per_rank(lambda x: (
            collective.all_reduce(x.T), collective.all_gather(x.T), collective.reduce_scatter(x.T),
        ), 2, "pmap" if spmd == "eager" else spmd)(x)
    assert_bits_equal(total, np.stack([2 * first.T + 100] * 2))
    assert_bits_equal(gathered, np.stack([np.concatenate([first.T, first.T + 100])] * 2))
    assert scattered.tolist() == [[[100, 108], [102, 110]], [[104, 112], [106, 114]]]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_view_that_is_not_dense_has_the_bits_of_its_copy(operation: str, transport: Transport) -> None:
    x = cancelling(WORLD, 64, "float32").reshape(WORLD, 8, 8)
    with open_collective(WORLD, transport) as collective:
        outputs = per_rank(lambda x: {name: getattr(collective, operation)(view(x)) for name, view in VIEWS.items()},
                           WORLD)(x)
    for name, view in VIEWS.items():
        dense = np.stack([np.ascontiguousarray(view(local)) for local in x])
        assert_bits_equal(outputs[name], reference(operation, dense), name)


def test_an_operand_in_another_layout_is_packed_first(transport: Transport) -> None:
    """A column-major argument, and a program whose own result is asked for in column-major."""
    from jax.experimental.layout import Format, Layout
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    x = cancelling(WORLD, 15, "float32").reshape(WORLD, 3, 5)
    mesh = Mesh(np.array(jax.devices()[:WORLD]), ("ranks",))
    column_major = Format(Layout(major_to_minor=(0, 2, 1)), NamedSharding(mesh, PartitionSpec("ranks")))
    with open_collective(WORLD, transport) as collective:
        mapped = jax.shard_map(lambda x: collective.all_reduce(x[0])[None], mesh=mesh, in_specs=PartitionSpec("ranks"),
                               out_specs=PartitionSpec("ranks"), check_vma=False)
        total = jax.jit(mapped, in_shardings=column_major, out_shardings=column_major)(
            jax.device_put(x, column_major))
        assert_bits_equal(total, row(x))


def test_a_call_whose_result_is_unused_is_still_made(x: np.ndarray, transport: Transport) -> None:
    def body(collective: DeterministicCollective, x: Any) -> Any:
        collective.all_reduce(x[:3])
        collective.barrier()
        return collective.all_reduce(x)

    assert_bits_equal(run(transport, body, x, expected_calls=3), row(x))


def test_a_result_unused_on_one_rank_hangs_nobody(x: np.ndarray, transport: Transport) -> None:
    def body(collective: DeterministicCollective, x: Any) -> Any:
        return jnp.where(lax.axis_index("ranks") == 0, x, collective.all_reduce(x))

    output = run(transport, body, x, expected_calls=1)
    assert_bits_equal(output[0], x[0])
    assert_bits_equal(output[1:], row(x)[1:])


def test_the_same_array_reduced_twice_makes_two_calls(x: np.ndarray, transport: Transport) -> None:
    first, second = run(transport, lambda c, x: (c.all_reduce(x), c.all_reduce(x)), x, expected_calls=2)
    assert_bits_equal(first, row(x))
    assert_bits_equal(second, row(x))


def test_a_sum_of_a_sum_is_the_tree_of_equal_values(x: np.ndarray, transport: Transport) -> None:
    twice = run(transport, lambda c, x: c.all_reduce(c.all_reduce(x)), x, expected_calls=2)
    assert_bits_equal(twice, row(row(x)))


@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop", "unrolled scan"])
def test_ten_turns_of_a_loop_make_ten_calls(loop: str, x: np.ndarray, transport: Transport) -> None:
    def body(collective: DeterministicCollective, x: Any) -> Any:
        def turn(value: Any) -> Any:
            return collective.all_reduce(value) * 0.25

        if loop == "fori_loop":
            return lax.fori_loop(0, 10, lambda _, value: turn(value), x)
        if loop == "while_loop":
            return lax.while_loop(lambda s: s[0] < 10, lambda s: (s[0] + 1, turn(s[1])), (0, x))[1]
        unroll = 5 if "unrolled" in loop else 1
        return lax.scan(lambda value, _: (turn(value), None), x, length=10, unroll=unroll)[0]

    expected = x
    for _ in range(10):
        expected = row(expected) * np.float32(0.25)
    assert_bits_equal(run(transport, body, x, expected_calls=10), expected)


def test_a_scan_that_stacks_sums_makes_a_call_a_turn_though_its_operand_never_changes(
        x: np.ndarray, transport: Transport) -> None:
    stacked = run(transport, lambda c, x: lax.scan(lambda s, _: (s, c.all_reduce(x)), 0, length=10)[1], x,
                  expected_calls=10)
    assert_bits_equal(stacked, np.stack([row(x)] * 10, axis=1))


@pytest.mark.parametrize(("taken", "expected_calls"), [(True, 1), (False, 0)])
def test_a_call_in_one_branch_is_made_when_the_branch_is_taken(
        taken: bool, expected_calls: int, x: np.ndarray, transport: Transport) -> None:
    def body(collective: DeterministicCollective, arguments: Any) -> Any:
        return lax.cond(arguments[1], collective.all_reduce, lambda x: x, arguments[0])

    output = run(transport, body, (x, np.full(WORLD, taken)), expected_calls)
    assert_bits_equal(output, row(x) if taken else x)


def test_a_switch_makes_the_calls_of_its_branch_and_leaves_the_order_of_later_ones(
        x: np.ndarray, transport: Transport) -> None:
    def body(collective: DeterministicCollective, arguments: Any) -> Any:
        x, branch = arguments
        chosen = lax.switch(branch, [lambda x: x, lambda x: collective.all_reduce(collective.all_reduce(x)),
                                     lambda x: collective.all_gather(x)[:8]], x)
        return chosen, collective.all_reduce(x)

    chosen, after = run(transport, body, (x, np.full(WORLD, 1)), expected_calls=3)
    assert_bits_equal(chosen, row(row(x)))
    assert_bits_equal(after, row(x))


def test_a_nested_jit_used_twice_makes_its_calls_twice(x: np.ndarray, transport: Transport) -> None:
    def body(collective: DeterministicCollective, x: Any) -> Any:
        inner = jax.jit(lambda x: jax.jit(collective.all_reduce)(x) * 0.5)
        return inner(inner(x))

    half = row(x) * np.float32(0.5)
    assert_bits_equal(run(transport, body, x, expected_calls=2), row(half) * np.float32(0.5))


AHEAD_OF_TIME = """
import sys, jax, numpy as np, jaxdp
devices = jax.devices()
with jaxdp.create_deterministic_collective(devices, transport=sys.argv[1]) as collective:
    x = np.ones((len(devices), 3), np.float32)
    program = jax.pmap(collective.all_reduce, axis_name="ranks", devices=devices).lower(x).compile()
    print([np.asarray(program(x)).tolist() for _ in range(3)])
"""


def test_a_program_compiled_ahead_of_time_runs_as_often_as_it_is_called(
        transport: Transport) -> None:
    """In a process that used no other transport, and of its own: a wrong number of tokens ends the process."""
    done = run_python(AHEAD_OF_TIME, transport, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.stdout.strip() == str([[[2.0] * 3] * 2] * 3)


def test_a_checkpointed_call_without_a_gradient_is_made_once(x: np.ndarray, transport: Transport) -> None:
    assert_bits_equal(run(transport, lambda c, x: jax.checkpoint(c.all_reduce)(x), x, expected_calls=1), row(x))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_vmap_is_one_call_with_the_bits_of_each_element(operation: str, transport: Transport) -> None:
    x = cancelling(WORLD, 24, "float32").reshape(WORLD, 3, 8)
    output = run(transport, lambda c, x: jax.vmap(getattr(c, operation))(x), x, expected_calls=1)
    assert_bits_equal(output, np.stack([reference(operation, x[:, i]) for i in range(3)], axis=1))


@pytest.mark.parametrize("shapes", ["equal", "distinct"])
def test_sixteen_independent_calls_at_eight_devices_run_in_one_order(shapes: str, transport: Transport) -> None:
    """Of distinct shapes, another order would be a mismatch; of equal shapes, it would mix their values."""
    count = 4 if transport == "xla" else 16
    lanes = [np.full((8, 3 + (i if shapes == "distinct" else 0)), 4.0**i, np.float32) for i in range(count)]
    with open_collective(8, transport) as collective:
        program = per_rank(lambda lanes: [collective.all_reduce(lane) for lane in lanes], 8)
        for _ in range(10):
            for lane, total in zip(lanes, program(lanes), strict=True):
                assert_bits_equal(total, lane * 8)


def test_two_groups_of_devices_keep_to_themselves(transport: Transport) -> None:
    x = exactly_summable(8, 5, "float32")
    devices = jax.devices()
    with (create_deterministic_collective(devices[:4], transport=transport) as low,
          create_deterministic_collective(devices[4:], transport=transport) as high):
        reduce_low = per_rank(low.all_reduce, 4, devices=devices[:4])
        reduce_high = per_rank(high.all_reduce, 4, devices=devices[4:])
        for _ in range(3):
            assert_bits_equal(reduce_low(x[:4]), row(x[:4]))
            assert_bits_equal(reduce_high(x[4:]), row(x[4:]))


@pytest.mark.parametrize("spmd", SPMD)
def test_a_rank_is_its_device_s_place_in_the_sequence(spmd: Spmd, transport: Transport) -> None:
    order = [jax.devices()[i] for i in (6, 1, 3, 2)]
    x = cancelling(WORLD, 8, "float32")
    with create_deterministic_collective(order, transport=transport) as collective:
        gathered, total, block = per_rank(lambda x: (
            collective.all_gather(x), collective.all_reduce(x), collective.reduce_scatter(x),
        ), WORLD, spmd, devices=order)(x)
    assert_bits_equal(gathered, reference("all_gather", x))
    assert_bits_equal(total, row(x))
    assert_bits_equal(block, reference("reduce_scatter", x))
