"""Running one function on every rank of this process, and what each collective must then return."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxdp

Spmd = Literal["pmap", "shard_map"]
Transport = Literal["local", "xla"]

SPMD: tuple[Spmd, ...] = ("pmap", "shard_map")
TRANSPORTS: tuple[Transport, ...] = ("local", "xla")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")


def open_collective(world_size: int, transport: Transport = "local", **options: Any) -> jaxdp.DeterministicCollective:
    """A communicator of the first `world_size` devices."""
    return jaxdp.create_deterministic_collective(jax.devices()[:world_size], transport=transport, **options)


def _to_host(array: jax.Array) -> np.ndarray:
    """The values; an empty array is not read, because JAX cannot assemble the shards of one."""
    return np.asarray(array) if array.size else np.zeros(array.shape, array.dtype)


def _shard_mapped(function: Callable[..., Any], devices: Sequence[jax.Device]) -> Callable[..., Any]:
    def body(*arguments: Any) -> Any:
        local = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]), arguments)
        return jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), function(*local))

    spec = PartitionSpec("ranks")
    mesh = Mesh(np.array(devices), ("ranks",))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def per_rank(function: Callable[..., Any], world_size: int, spmd: Spmd = "pmap",
             devices: Sequence[jax.Device] | None = None) -> Callable[..., Any]:
    """`function` as the body of one rank, compiled for `devices` (the first `world_size`).

    Takes and returns pytrees whose leaves have a leading axis of ranks; waits, and returns NumPy.
    """
    devices = jax.devices()[:world_size] if devices is None else devices
    mapped = (jax.pmap(function, axis_name="ranks", devices=devices) if spmd == "pmap"
              else _shard_mapped(function, devices))
    return lambda *arguments: jax.tree.map(_to_host, mapped(*arguments))


def in_threads(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each body returned or raised, all running at once in threads of their own."""
    outcomes: list[Any] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            outcomes[index] = bodies[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def reference(operation: str, x: np.ndarray) -> np.ndarray:
    """What the ranks must get for inputs `x[rank]`, by the executable sum: leading axis = rank."""
    world_size = len(x)
    if operation == "all_gather":
        gathered = x.reshape(world_size * x.shape[1], *x.shape[2:])
        return np.stack([gathered] * world_size)
    total = jaxdp.tree_sum(x)
    if operation == "all_reduce":
        return np.stack([total] * world_size)
    return total.reshape(world_size, total.shape[0] // world_size, *total.shape[1:])


def sequential(x: np.ndarray) -> np.ndarray:
    """The sum in rank order: ((x0 + x1) + x2) + x3."""
    return functools.reduce(np.add, list(x))


def ring(x: np.ndarray) -> np.ndarray:
    """The sum of a ring: chunk c of the elements starts at rank c and goes round in rank order."""
    chunks = np.array_split(np.arange(x.shape[1]), len(x))
    return np.concatenate([sequential(np.roll(x, -c, axis=0)[:, chunk]) for c, chunk in enumerate(chunks)])


def strided(x: np.ndarray) -> np.ndarray:
    """The tree of recursive halving, in which rank r first meets rank r + W/2: (x0 + x2) + (x1 + x3)."""
    while len(x) > 1:
        x = x[:len(x) // 2] + x[len(x) // 2:]
    return x[0]


def widened(x: np.ndarray) -> np.ndarray:
    """The balanced tree accumulated in the next wider type and rounded once."""
    wide = x.astype(np.float64 if x.dtype == np.float32 else np.float32)
    while len(wide) > 1:
        wide = wide[::2] + wide[1::2]
    return wide[0].astype(x.dtype)


OTHER_ORDERS = {"sequential": sequential, "ring": ring, "strided": strided, "widened": widened}


def telling(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> np.ndarray:
    """Values that show a wrong order, a wider add, a flushed subnormal, a lost sign or a kept payload.

    A third are random bit patterns (NaNs with payloads among them), a third signed zeros, subnormals,
    extremes and infinities, a third ordinary numbers of both signs and many exponents.
    """
    generator = np.random.default_rng(seed)
    count = math.prod(shape)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    random = generator.integers(0, np.iinfo(unsigned).max, count, unsigned, endpoint=True).view(dtype)
    limits = ml_dtypes.finfo(dtype)
    magnitudes = [0.0, limits.smallest_subnormal, limits.tiny, limits.max, np.inf, 1.0]
    special = np.array([sign * float(value) for value in magnitudes for sign in (1.0, -1.0)]).astype(dtype)
    ordinary = np.ldexp(generator.standard_normal(count), generator.integers(-6, 7, count)).astype(dtype)
    picked = [random, generator.choice(special, count), ordinary]
    return np.choose(generator.integers(0, 3, count), [values.view(unsigned) for values in picked]).view(
        dtype).reshape(shape)
