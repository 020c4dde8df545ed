"""Ranks that meet inside jitted JAX programs, each compiled for one device that knows no other."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, cancelling

from jaxdp.collectives import DeterministicCollective, create_deterministic_collective
from jaxdp.errors import CollectiveTimeout, CommunicatorClosed, ConfigError, PeerFailure, RankMismatch
from jaxdp.tree import tree_sum
from multiprocess.ranks import Ranks


def rank() -> int:
    return int(os.environ["RANK"])


def check_operations() -> None:
    with create_deterministic_collective(timeout_s=30.0) as collective:
        world = collective.world_size
        assert collective.capabilities.transport == "ipc"
        assert collective.capabilities.transport_reason == f"this process is rank {rank()} of {world} on this node"
        for dtype in ("float32", "bfloat16", "float16"):
            x = cancelling(world, world * 6, dtype)
            check_one_program(collective, x)
        check_layouts(collective)
        check_order(collective)


def check_one_program(collective: DeterministicCollective, x: np.ndarray) -> None:
    """All operations in one program, compiled and eager."""
    def program(v: jax.Array) -> tuple[jax.Array, ...]:
        collective.barrier()
        both = collective.reduce_scatter_many([v, v[::-1]])
        return collective.all_reduce(v), collective.all_gather(v[:5]), *both

    expected = tree_sum(x)
    blocks = [expected.reshape(len(x), -1)[rank()], expected[::-1].reshape(len(x), -1)[rank()]]
    for run in (jax.jit(program), program):
        results = run(jnp.asarray(x[rank()]))
        for result, right in zip(results, [expected, x[:, :5].reshape(-1), *blocks], strict=True):
            assert_bits_equal(result, right)


def check_layouts(collective: DeterministicCollective) -> None:
    """A transposed view: rank r holds arange(8) as (2, 4), plus 100 r."""
    x = jnp.arange(8.0).reshape(2, 4) + 100 * rank()
    for run in (jax.jit, lambda f: f):
        total = run(lambda v: collective.all_reduce(v.T))(x)
        right = collective.world_size * np.arange(8.0).reshape(2, 4).T + 100 * sum(range(collective.world_size))
        assert_bits_equal(total, right.astype(np.float32))
        own = np.split(right, collective.world_size)[rank()]
        assert_bits_equal(run(lambda v: collective.reduce_scatter(v.T))(x), own.astype(np.float32))


def check_order(collective: DeterministicCollective) -> None:
    """Unused results, two independent calls, one array twice, a scan and a branch: the same count on every rank."""
    @jax.jit
    def program(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        unused = collective.all_reduce(v * (rank() + 1))
        first, second = collective.all_reduce(v), collective.all_reduce(v[:3])
        total, _ = jax.lax.scan(lambda carry, _: (collective.all_reduce(carry) / 2, None), v, None, length=10)
        branch = jax.lax.cond(v[0] > 0, collective.all_reduce, lambda y: y, v)
        del unused
        return first + collective.all_reduce(v) + branch, total[:3] + second

    before = collective.calls(rank())
    sums, mixed = program(jnp.ones(7))
    world = collective.world_size
    np.testing.assert_array_equal(sums, np.full(7, 3.0 * world))
    np.testing.assert_array_equal(mixed, np.full(3, (world / 2) ** 10 + world))
    assert collective.calls(rank()) == before + 15


@pytest.mark.parametrize("world", [2, 4])
def test_operations_layouts_and_order_hold_inside_compiled_programs(ranks: Ranks, world: int) -> None:
    ranks.run("test_ipc_jax:check_operations", world)


def check_gradients() -> None:
    """Each rank's loss is the sum over ranks, as if the ranks were one program."""
    with create_deterministic_collective(timeout_s=30.0) as collective:
        world, own = collective.world_size, rank()
        x = np.arange(1.0, 1 + 4 * world, dtype=np.float32) * (own + 1)
        weights = np.arange(4.0 * world, dtype=np.float32)

        def gathered(v: jax.Array) -> jax.Array:
            return (collective.all_gather(v[:4]) * weights).sum()

        def scattered(v: jax.Array) -> jax.Array:
            return (collective.reduce_scatter(v) * weights[:4] * (own + 1)).sum()

        def reduced(v: jax.Array) -> jax.Array:
            return (collective.all_reduce(v) * weights * (own + 1)).sum()

        of_gather = np.zeros_like(x)
        of_gather[:4] = world * weights[4 * own:4 * own + 4]
        assert_bits_equal(jax.jit(jax.grad(gathered))(x), of_gather)
        assert_bits_equal(jax.jit(jax.grad(scattered))(x),
                          np.concatenate([weights[:4] * (r + 1) for r in range(world)]).astype(np.float32))
        assert_bits_equal(jax.jit(jax.grad(reduced))(x), weights * np.float32(sum(range(1, world + 1))))


def test_gradients_flow_through_every_operation(ranks: Ranks) -> None:
    ranks.run("test_ipc_jax:check_gradients", 2)


def check_subnormals_after_a_late_peer() -> None:
    """XLA flushes subnormals on its own threads; a call that the worker thread ends must not change that."""
    with create_deterministic_collective(timeout_s=30.0) as collective:
        program = jax.jit(lambda v, tiny: (collective.all_reduce(v) * 0 + tiny) * jnp.float32(0.5))
        results = []
        for delay_s in (0.0, 0.0, 0.3, 0.3):
            collective.barrier()
            if rank() == 1:
                time.sleep(delay_s)
            results.append(np.asarray(program(jnp.ones(64), jnp.full(64, 2.0**-126, jnp.float32))))
        for result in results[1:]:
            assert_bits_equal(result, results[0])


def test_arithmetic_after_a_call_does_not_depend_on_the_thread_that_ended_it(ranks: Ranks) -> None:
    ranks.run("test_ipc_jax:check_subnormals_after_a_late_peer", 2)


def check_two_communicators_in_opposite_orders() -> None:
    """One program whose independent calls of two communicators are traced in another order on rank 1."""
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(create_deterministic_collective(timeout_s=5.0)) for _ in range(2)]
        order = both if rank() == 0 else both[::-1]
        program = jax.jit(lambda v: sum(collective.all_reduce(v) for collective in order))
        for _ in range(20):
            np.testing.assert_array_equal(program(jnp.ones(1000)), np.full(1000, 4.0))


def test_two_communicators_used_in_opposite_orders_do_not_deadlock(ranks: Ranks) -> None:
    ranks.run("test_ipc_jax:check_two_communicators_in_opposite_orders", 2)


def check_named_failures() -> None:
    with pytest.raises(CollectiveTimeout, match=r"call 2, all_reduce float32\[3\]: rank 0 waited 0\.5 s for rank 1"):
        fail_by(timeout_s=0.5, shape=3, late_s=1.5)
    with pytest.raises(RankMismatch, match=r"rank 0 has call 2, .* float32\[3\], but rank 1 has .* float32\[4\]"):
        fail_by(timeout_s=30.0, shape=3 + rank(), late_s=0.0)
    collective = create_deterministic_collective(timeout_s=30.0)
    jax.jit(collective.all_reduce)(jnp.ones(3)).block_until_ready()
    if rank() == 1:
        os._exit(0)
    with pytest.raises(PeerFailure, match="rank 0 waited for rank 1, whose process has died"), collective:
        jax.jit(collective.all_reduce)(jnp.ones(5)).block_until_ready()
    with pytest.raises(CommunicatorClosed):
        collective.all_reduce(jnp.ones(3))


def fail_by(timeout_s: float, shape: int, late_s: float) -> None:
    with create_deterministic_collective(timeout_s=timeout_s) as collective:
        jax.jit(collective.all_reduce)(jnp.ones(3)).block_until_ready()
        if rank() == 1:
            time.sleep(late_s)
        jax.jit(collective.all_reduce)(jnp.ones(shape)).block_until_ready()


def test_failures_inside_programs_are_raised_by_name(ranks: Ranks) -> None:
    ranks.run("test_ipc_jax:check_named_failures", 2)


def check_refused_transports() -> None:
    refused: dict[Literal["local", "xla"], str] = {
        "local": "'auto' or 'ipc', as this process is rank",
        "xla": "'auto' or 'ipc' unless jax.distributed is initialized"}
    for transport, text in refused.items():
        with pytest.raises(ConfigError, match=text):
            create_deterministic_collective(transport=transport)
    with pytest.raises(ConfigError, match="one device in a ranked process, or None"):
        create_deterministic_collective(jax.devices() * 2)


def test_other_transports_are_refused_in_a_ranked_process(ranks: Ranks) -> None:
    ranks.run("test_ipc_jax:check_refused_transports", 2)


def test_ipc_is_refused_without_ranks() -> None:
    with pytest.raises(ConfigError, match="RANK, LOCAL_RANK and WORLD_SIZE are not set"):
        create_deterministic_collective(transport="ipc")


def check_lonely_rank() -> None:
    with create_deterministic_collective() as collective:
        assert (collective.capabilities.transport, collective.world_size) == ("ipc", 1)
        nan = np.array([0x7FC00123], np.uint32).view(np.float32)
        assert_bits_equal(jax.jit(collective.all_reduce)(jnp.asarray(nan)), nan)


def test_a_world_of_one_copies_bits(ranks: Ranks) -> None:
    ranks.run("test_ipc_jax:check_lonely_rank", 1)


def check_device_of_local_rank() -> None:
    with create_deterministic_collective() as collective:
        device = jax.local_devices()[rank()]
        assert collective.capabilities.device_names == (f"cpu:{device.id}",)
        x = jax.device_put(jnp.ones(3), device)
        np.testing.assert_array_equal(jax.jit(collective.all_reduce)(x), np.full(3, 2.0))


def test_local_rank_picks_the_device_where_several_are_seen(ranks: Ranks) -> None:
    ranks.run("test_ipc_jax:check_device_of_local_rank", 2,
              environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
