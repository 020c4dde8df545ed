"""What several test files share: comparison by bits, inputs with known sums, the command line."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORLD_SIZES = (1, 2, 4, 8)
DTYPES = ("float32", "float16", "bfloat16")

_BIG = {"float32": 2.0**24, "float16": 2048.0, "bfloat16": 256.0}

# The balanced tree's sum of `canary`, one constant at every element.
CANARY_BITS = {
    (1, "float32"): 0x4B800000, (1, "float16"): 0x6800, (1, "bfloat16"): 0x4380,
    (2, "float32"): 0x4B800000, (2, "float16"): 0x6800, (2, "bfloat16"): 0x4380,
    (4, "float32"): 0x4B800001, (4, "float16"): 0x6801, (4, "bfloat16"): 0x4381,
    (8, "float32"): 0x4B800003, (8, "float16"): 0x6803, (8, "bfloat16"): 0x4383,
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name in `DTYPES` (or any other NumPy name)."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def bits(array: Any) -> np.ndarray:
    """`array` as unsigned integers of its item size, same shape; a copy, never a conversion."""
    host = np.asarray(array)
    flat = np.ascontiguousarray(host).reshape(-1)  # reshape first: a view of a 0-d array is refused
    return flat.view(np.dtype(f"u{host.dtype.itemsize}")).reshape(host.shape)


def assert_bits_equal(actual: Any, expected: Any, what: str = "array") -> None:
    """Fails unless both arrays have one shape, one dtype and the same bits.

    The message names the first index that differs and both bit patterns. NaNs are equal only if
    their bits are, and -0 is not 0.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    differs = np.argwhere(bits(actual) != bits(expected))
    if len(differs) == 0:
        return
    index = tuple(int(i) for i in differs[0])
    digits = 2 * actual.dtype.itemsize
    raise AssertionError(
        f"{what}: {len(differs)} of {actual.size} elements differ, the first at {index}: "
        f"0x{int(bits(actual)[index]):0{digits}X} ({actual[index]}), "
        f"expected 0x{int(bits(expected)[index]):0{digits}X} ({expected[index]})")


def assert_trees_bits_equal(actual: Any, expected: Any) -> None:
    """`assert_bits_equal` for every leaf of two pytrees of one structure, named by path."""
    import jax

    actual_leaves, actual_structure = jax.tree_util.tree_flatten_with_path(actual)
    expected_leaves, expected_structure = jax.tree_util.tree_flatten_with_path(expected)
    assert actual_structure == expected_structure, f"{actual_structure}, expected {expected_structure}"
    for (path, leaf), (_, expected_leaf) in zip(actual_leaves, expected_leaves, strict=True):
        assert_bits_equal(leaf, expected_leaf, jax.tree_util.keystr(path))


def canary(world_size: int, count: int, dtype: str) -> np.ndarray:
    """Inputs `dtype[world_size, count]` whose sum tells the balanced tree from any other order.

    Rank r, element i is BIG when (r + i) mod W == 0, else 1, where BIG + 1 rounds back to BIG.
    The tree gives `CANARY_BITS[world_size, dtype]` everywhere; from world size 4 on, rank order
    does not.
    """
    index = np.add.outer(np.arange(world_size), np.arange(count)) % world_size
    return np.where(index == 0, _BIG[dtype], 1.0).astype(numpy_dtype(dtype))


def canary_sum(world_size: int, count: int, dtype: str) -> np.ndarray:
    """The balanced tree's sum of `canary(world_size, count, dtype)`: `dtype[count]`."""
    target = numpy_dtype(dtype)
    pattern = np.full(count, CANARY_BITS[world_size, dtype], np.dtype(f"u{target.itemsize}"))
    return pattern.view(target)


def exactly_summable(world_size: int, count: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Small integers `dtype[world_size, count]`: their sum is exact in every order, at any world
    size up to 16, in each of `DTYPES`. A wrong result is a fault of transport, not of order."""
    values = np.random.default_rng(seed).integers(-16, 17, (world_size, count))
    return values.astype(numpy_dtype(dtype))


def cancelling(world_size: int, count: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Finite `dtype[world_size, count]` of both signs over a wide range of exponents, so that most
    sums depend on the order of the additions."""
    generator = np.random.default_rng(seed)
    exponents = generator.integers(-6, 7, (world_size, count))
    return np.ldexp(generator.standard_normal((world_size, count)), exponents).astype(numpy_dtype(dtype))


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment as a user's shell has it: on CPU, no forced devices, no ranks."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("XLA_FLAGS", "RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return environment | {"JAX_PLATFORMS": "cpu"} | changes


def run_python(code: str, *arguments: object, timeout_s: float = 100.0, check: bool = True,
               cwd: pathlib.Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter (`-c`), by default from the repository's root.

    With `check`, a non-zero exit fails the test with the end of both outputs. The deadline kills.
    """
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd,
                          stdin=subprocess.DEVNULL, env=clean_environment(**environment))
    if check and done.returncode != 0:
        raise AssertionError(f"{command[3:] or 'python -c'} exited {done.returncode}\n"
                             f"stdout: {done.stdout[-2000:]}\nstderr: {done.stderr[-4000:]}")
    return done


def run_jaxdp(*arguments: object, timeout_s: float = 100.0, check: bool = True,
              cwd: pathlib.Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line `jaxdp *arguments` with this interpreter; otherwise as `run_python`."""
    return run_python("import sys; from jaxdp.cli import main; sys.exit(main())", *arguments,
                      timeout_s=timeout_s, check=check, cwd=cwd, **environment)
