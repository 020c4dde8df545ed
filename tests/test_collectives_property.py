"""Any program of collectives, over any ranks' bits, gives what the executable sum gives call by call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from helpers import DTYPES, WORLD_SIZES, assert_bits_equal, numpy_dtype
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import OPERATIONS, SPMD, TRANSPORTS, Spmd, Transport, open_collective, per_rank, reference, telling

from jaxdp import DeterministicCollective

SEEDS = 3  # how many inputs each compiled program is given


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a drawn program: lanes cut out of the rank's one buffer of each dtype, at any offset."""

    operation: str
    dtypes: tuple[str, ...]
    blocks: int  # the leading axis is this many times the world size
    tail: tuple[int, ...]
    offset: int

    def lane(self, buffers: Any, dtype: str, world_size: int) -> Any:
        """The lane of `dtype`: elements `offset` on, in the call's shape; `buffers` hold one rank's values."""
        shape = (world_size * self.blocks, *self.tail)
        return buffers[dtype][self.offset:self.offset + int(np.prod(shape))].reshape(shape)

    def run(self, collective: DeterministicCollective, buffers: Any) -> list[Any]:
        lanes = [self.lane(buffers, dtype, collective.world_size) for dtype in self.dtypes]
        if self.operation == "all_gather":
            return [collective.all_gather(lane) for lane in lanes]
        many = getattr(collective, f"{self.operation}_many")
        return many(lanes) if len(lanes) > 1 else [getattr(collective, self.operation)(lanes[0])]

    def expected(self, buffers: dict[str, np.ndarray], world_size: int) -> list[np.ndarray]:
        return [reference(self.operation, np.stack([
            self.lane({dtype: local}, dtype, world_size) for local in buffers[dtype]])) for dtype in self.dtypes]


@dataclasses.dataclass(frozen=True)
class Program:
    world_size: int
    transport: Transport
    spmd: Spmd
    calls: tuple[Call, ...]


CALLS = st.builds(
    Call, operation=st.sampled_from(OPERATIONS), blocks=st.sampled_from([1, 2, 5, 33]),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3).map(tuple),
    tail=st.sampled_from([(), (1,), (3,), (2, 5)]), offset=st.integers(0, 17))
PROGRAMS = st.builds(
    Program, world_size=st.sampled_from(WORLD_SIZES), transport=st.sampled_from(TRANSPORTS),
    spmd=st.sampled_from(SPMD), calls=st.lists(CALLS, min_size=1, max_size=4).map(tuple))
# No shrinking: each example compiles a program, and the programs are small enough to read as they are.
BOUNDED = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate],
                   suppress_health_check=[HealthCheck.too_slow])
BUFFER_LENGTH = 17 + max(WORLD_SIZES) * 33 * 10


def inputs(world_size: int, seed: int) -> dict[str, np.ndarray]:
    """`dtype[rank, BUFFER_LENGTH]` for each dtype."""
    return {dtype: telling((world_size, BUFFER_LENGTH), numpy_dtype(dtype), seed) for dtype in DTYPES}


@settings(BOUNDED, max_examples=30)
@given(program=PROGRAMS, seed=st.integers(0, 2**32 - 1))
def test_any_program_of_collectives_has_the_tree_s_bits(program: Program, seed: int) -> None:
    world_size = program.world_size
    with open_collective(world_size, program.transport) as collective:
        run = per_rank(lambda buffers: [call.run(collective, buffers) for call in program.calls],
                       world_size, program.spmd)
        for step in range(SEEDS):
            buffers = inputs(world_size, seed + step)
            for call, outputs in zip(program.calls, run(buffers), strict=True):
                for output, expected in zip(outputs, call.expected(buffers, world_size), strict=True):
                    assert_bits_equal(output, expected, str(call))


@settings(BOUNDED, max_examples=10)
@given(program=PROGRAMS, seed=st.integers(0, 2**32 - 1))
def test_both_transports_and_both_ways_to_map_give_the_same_bits(program: Program, seed: int) -> None:
    world_size = program.world_size
    buffers = inputs(world_size, seed)
    results = []
    for transport, spmd in zip(TRANSPORTS, SPMD, strict=True):
        with open_collective(world_size, transport) as collective:
            results.append(per_rank(lambda buffers, c=collective: [
                call.run(c, buffers) for call in program.calls], world_size, spmd)(buffers))
    for call, one, other in zip(program.calls, *results, strict=True):
        for lane, other_lane in zip(one, other, strict=True):
            assert_bits_equal(lane, other_lane, str(call))
