"""`capabilities` says what was chosen and why, and each statement in it is true."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from helpers import WORLD_SIZES, assert_bits_equal, cancelling
from ranks import TRANSPORTS, Transport, open_collective, per_rank, reference

from jaxdp import create_deterministic_collective
from jaxdp.errors import ConfigError


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_it_names_backend_transport_devices_world_and_limits(world_size: int, transport: Transport) -> None:
    with open_collective(world_size, transport, capacity_bytes=1 << 20, timeout_s=7.5) as collective:
        said = collective.capabilities
        assert collective.world_size == said.world_size == world_size
    assert said.backend == "cpu"
    assert said.transport == transport
    assert said.device_names == tuple(f"cpu:{i}" for i in range(world_size))
    assert (said.capacity_bytes, said.timeout_s) == (1 << 20, 7.5)
    assert said.reduction_order == "balanced_rank_tree"
    assert said.reduction_dtypes == ("float32", "float16", "bfloat16")


def test_the_defaults_are_all_devices_64_mib_and_30_seconds() -> None:
    with create_deterministic_collective() as collective:
        said = collective.capabilities
    assert (said.world_size, said.capacity_bytes, said.timeout_s) == (len(jax.devices()), 64 << 20, 30.0)


def test_auto_chooses_local_in_one_process_and_says_why() -> None:
    with create_deterministic_collective(jax.devices()[:2]) as collective:
        said = collective.capabilities
    assert said.transport == "local"
    assert "one process" in said.transport_reason


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_transport_that_was_asked_for_is_the_one_in_force(transport: Transport) -> None:
    with open_collective(2, transport) as collective:
        assert (collective.capabilities.transport, collective.capabilities.transport_reason) == (transport, "asked for")
        per_rank(collective.all_reduce, 2)(np.zeros((2, 3), np.float32))
        counts_calls = collective.calls(0) == 1  # only our own protocol numbers calls
    assert counts_calls == (transport == "local")


def test_a_transport_that_cannot_serve_one_process_is_refused_not_replaced() -> None:
    with pytest.raises(ConfigError, match="ipc"):
        create_deterministic_collective(jax.devices()[:2], transport="ipc")


def test_auto_and_both_transports_give_the_same_bits() -> None:
    x = cancelling(4, 1000, "bfloat16")
    for transport in ("auto", "local", "xla"):
        with create_deterministic_collective(jax.devices()[:4], transport=transport) as collective:
            assert_bits_equal(per_rank(collective.all_reduce, 4)(x), reference("all_reduce", x), transport)


def test_the_local_transport_lists_its_routes_and_their_sources() -> None:
    with open_collective(2) as collective:
        routes = collective.capabilities.routes
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        assert [(line.name, line.maximum_bytes) for line in getattr(routes, operation)] == [("direct", None)]


def test_the_xla_transport_claims_no_route_but_rank_major() -> None:
    with open_collective(2, "xla") as collective:
        routes = collective.capabilities.routes
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        assert {line.name for line in getattr(routes, operation)} == {"rank-major"}


def test_a_host_call_that_blocks_claims_no_overlap_and_no_fusion() -> None:
    with open_collective(2) as collective:
        said = collective.capabilities
    assert (said.supports_async_overlap, said.supports_compute_communication_fusion) == (False, False)


def test_it_cannot_be_changed() -> None:
    with open_collective(1) as collective, pytest.raises(dataclasses.FrozenInstanceError):
        collective.capabilities.transport = "xla"  # pyright: ignore[reportAttributeAccessIssue]
