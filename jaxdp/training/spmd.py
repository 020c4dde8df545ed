"""The one place that maps a per-rank function over devices, and the two views of its arrays.

A replicated or per-rank value is held as one array per leaf with a leading axis of ranks, one row a
device ("stacked"), or as a list of one-row arrays, one a device ("rows"). Both are the same
buffers: going from one to the other copies nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxdp.training.compilation import Compilation
from jaxdp.training.portable import PortableExecutable

AXIS = "ranks"


class SpmdProgram:
    """A per-rank function mapped over devices, compiled once for each set of argument shapes.

    `jax.pmap` today; everything that would change with `jit(shard_map)` is in this class.
    Arguments are stacked pytrees (NumPy arrays with a leading rank axis are placed by JAX).
    """

    def __init__(self, function: Callable[..., Any], devices: Sequence[jax.Device], *,
                 donate: tuple[int, ...] = (), compiler_options: dict[str, Any] | None = None) -> None:
        self._mapped = jax.pmap(function, axis_name=AXIS, devices=list(devices), donate_argnums=donate)
        self._options = compiler_options
        self._compiled: dict[Any, Any] = {}

    def prepare(self, shapes: Any, *arguments: Any) -> float:
        """Compiles for arguments of this kind, known by the hashable `shapes`; milliseconds spent."""
        if shapes in self._compiled:
            return 0.0
        start = time.perf_counter()
        self._compiled[shapes] = self._mapped.lower(*arguments).compile(compiler_options=self._options)
        return (time.perf_counter() - start) * 1e3

    def __call__(self, shapes: Any, *arguments: Any) -> Any:
        """Runs the program prepared for `shapes`."""
        return self._compiled[shapes](*arguments)

    def compiled_text(self) -> list[str]:
        """The optimized HLO of each compiled program: what a test counts collectives in."""
        return [compiled.as_text() for compiled in self._compiled.values()]


class RowProgram:
    """A function compiled once for a single device, whose HLO knows no world size, run on any device.

    Arguments are committed to the device that runs; `shapes` is a hashable that tells apart the sets
    of argument shapes it is called with.
    """

    def __init__(self, function: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> None:
        self._jitted = jax.jit(function, donate_argnums=donate)
        self._compiled: dict[Any, PortableExecutable] = {}
        self._loaded: dict[Any, jax.stages.Compiled] = {}

    def prepare(self, compilation: Compilation, shapes: Any, devices: Sequence[jax.Device], *arguments: Any) -> Any:
        """Traces the function now, and compiles it and loads it on `devices` as part of `compilation`.

        `arguments` are of `devices[0]`: arrays, or `on_device` of their shapes. Returns the shapes of
        the results, on `devices[0]`. Call it once for each `shapes`.
        """
        lowered = self._jitted.lower(*arguments)

        def compile_and_load() -> None:
            portable = self._compiled[shapes] = PortableExecutable(lowered.compile())
            self._loaded[shapes, devices[0]] = portable.compiled
            for device in devices[1:]:
                self._loaded[shapes, device] = portable.load_on(device)

        compilation.submit(compile_and_load)
        return on_device(lowered.out_info, devices[0])

    def __call__(self, shapes: Any, device: jax.Device, *arguments: Any) -> Any:
        """Runs on `device`; compiles or loads there what was not prepared."""
        program = self._loaded.get((shapes, device))
        if program is None:
            program = self._load(shapes, device, arguments)
        return program(*arguments)

    def _load(self, shapes: Any, device: jax.Device, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        first = self._compiled.get(shapes)
        if first is None:
            program = self._jitted.lower(*arguments).compile()
            self._compiled[shapes] = PortableExecutable(program)
        else:
            program = first.load_on(device)
        self._loaded[shapes, device] = program
        return program


def on_device(tree: Any, device: jax.Device) -> Any:
    """Shapes and dtypes of arrays committed to `device`: arguments to prepare a row program with."""
    place = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)


def sharding(devices: Sequence[jax.Device]) -> NamedSharding:
    """One row of the leading axis a device."""
    return NamedSharding(Mesh(np.array(list(devices)), (AXIS,)), PartitionSpec(AXIS))


def stack(rows: Sequence[Any], devices: Sequence[jax.Device]) -> Any:
    """Rows, one pytree a device with leaves of shape (1, ...), as one stacked pytree."""
    placed = sharding(devices)

    def join(*leaves: jax.Array) -> jax.Array:
        shape = (len(leaves), *leaves[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, placed, list(leaves))

    return jax.tree.map(join, *rows)


def stacked_shapes(row: Any, devices: Sequence[jax.Device]) -> Any:
    """The shapes and dtypes of what `stack` makes of rows like `row`: arguments to prepare a program with."""
    placed = sharding(devices)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(devices), *leaf.shape[1:]), leaf.dtype, sharding=placed),
                        row)


def unstack(stacked: Any, devices: Sequence[jax.Device]) -> list[Any]:
    """A stacked pytree as rows, in the order of `devices`."""
    leaves, structure = jax.tree.flatten(stacked)
    columns = []
    for leaf in leaves:
        by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
        columns.append([by_device[device] for device in devices])
    return [structure.unflatten(column[rank] for column in columns) for rank in range(len(devices))]


def replicate(tree: Any, devices: Sequence[jax.Device]) -> list[Any]:
    """Host arrays copied to every device, as rows.

    The copy is explicit: on CPU `device_put` may go on reading the caller's memory.
    """
    def on(device: jax.Device) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf)[None], device), tree)

    return [on(device) for device in devices]


def first_row(tree: Any) -> Any:
    """Drops the leading axis of every leaf (inside a row program)."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def as_row(tree: Any) -> Any:
    """Adds a leading axis of one to every leaf (inside a row program)."""
    return jax.tree.map(lambda leaf: leaf[None], tree)
