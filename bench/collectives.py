"""Strict collectives beside XLA's own, in one process and one run.

    python bench/collectives.py --world 8 --platform cpu

Per size and operation: a program of `calls` calls, each depending on the one before, of the strict
collective and of `lax.psum`, `lax.all_gather` or `lax.psum_scatter`, timed in turn. Bytes are one
rank's input. Bus bandwidth is counted as in nccl-tests: 2(W-1)/W of the bytes for all_reduce,
(W-1)/W of the larger side for the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common


def parse_options() -> argparse.Namespace:
    """Sizes in bytes, one world size a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4, choices=(1, 2, 4, 8))
    parser.add_argument("--platform", default="cpu", choices=("cpu", "cuda", "rocm"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << exponent for exponent in range(12, 27, 2)])
    parser.add_argument("--operations", nargs="+", default=["all_reduce", "all_gather", "reduce_scatter"],
                        choices=("all_reduce", "all_gather", "reduce_scatter"))
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--output", type=Path, help="write the rows, with machine and command, to this JSON file")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    """Runs the bench and prints one line a size."""
    common.use_platform(options.platform, options.world)
    rows = []
    print(f"{'operation':<15}{'bytes':>11}{'strict us':>12}{'xla us':>12}{'ratio':>8}{'GB/s':>8}{'xla':>8}  bits")
    for operation in options.operations:
        for size in options.sizes:
            row = measure(options, operation, size)
            rows.append(row)
            print(f"{operation:<15}{size:>11}{row['strict_us']['median']:>12.1f}{row['native_us']['median']:>12.1f}"
                  f"{row['ratio']:>8.2f}{row['strict_busbw_gbs']:>8.2f}{row['native_busbw_gbs']:>8.2f}"
                  f"  {'equal' if row['equals_tree_sum'] else 'WRONG'}", flush=True)
    common.write_results(options.output, "collectives", rows, world=options.world, dtype=options.dtype)


def measure(options: argparse.Namespace, operation: str, size: int) -> dict[str, Any]:
    """One row: both sides of one operation at one size."""
    import jax
    import numpy as np

    from jaxdp.collectives import create_deterministic_collective

    devices = jax.devices()[:options.world]
    calls = calls_in_program(options.platform, size)
    elements = max(options.world, size // np.dtype(jax.numpy.dtype(options.dtype)).itemsize)
    values = np.random.default_rng(0).standard_normal((options.world, elements))
    x = jax.pmap(lambda row: row, devices=devices)(jax.numpy.asarray(values, options.dtype))
    with create_deterministic_collective(devices, capacity_bytes=max(size, 64) * 2) as collective:
        strict = jax.pmap(strict_program(collective, operation, calls), axis_name="ranks", devices=devices)
        native = jax.pmap(native_program(operation, calls), axis_name="ranks", devices=devices)
        times = common.interleaved({"strict": lambda: jax.block_until_ready(strict(x)),
                                    "native": lambda: jax.block_until_ready(native(x))}, samples=options.samples)
        right = equals_oracle(collective, operation, devices, x)
    factor = {"all_reduce": 2 * (options.world - 1) / options.world, "all_gather": options.world - 1,
              "reduce_scatter": (options.world - 1) / options.world}[operation]
    strict_us, native_us = (common.summary_us(times[side], calls) for side in ("strict", "native"))
    return {"operation": operation, "bytes": size, "dtype": options.dtype, "world": options.world, "calls": calls,
            "strict_us": strict_us, "native_us": native_us,
            "ratio": common.paired_ratio(times["strict"], times["native"]),
            "strict_busbw_gbs": factor * size / strict_us["median"] / 1e3,
            "native_busbw_gbs": factor * size / native_us["median"] / 1e3, "equals_tree_sum": right}


def calls_in_program(platform: str, size: int) -> int:
    """Enough that the dispatch of the program does not count."""
    if platform == "cpu":
        return 20 if size <= 1 << 16 else 8 if size <= 1 << 22 else 3
    return 100 if size <= 1 << 20 else 40


def strict_program(collective: Any, operation: str, calls: int) -> Any:
    """`calls` strict calls, each after the one before."""

    def program(x: Any) -> Any:
        chain = collective.chain()
        one = {"all_reduce": lambda v: chain.all_reduce_many([v])[0], "all_gather": chain.all_gather,
               "reduce_scatter": lambda v: chain.reduce_scatter_many([v])[0]}[operation]
        return repeated(one, x, calls)

    return program


def native_program(operation: str, calls: int) -> Any:
    """`calls` calls of XLA's own collective, each after the one before."""
    import jax

    one = {"all_reduce": lambda v: jax.lax.psum(v, "ranks"),
           "all_gather": lambda v: jax.lax.all_gather(v, "ranks", tiled=True),
           "reduce_scatter": lambda v: jax.lax.psum_scatter(v, "ranks", tiled=True)}[operation]
    return lambda x: repeated(one, x, calls)


def repeated(one: Any, x: Any, calls: int) -> Any:
    """Each call waits for the one before: the result halved, or where it has another shape an update
    of one element in place."""
    result = one(x)
    for _ in range(calls - 1):
        x = result * 0.5 if result.shape == x.shape else x.at[0].set(result[0] * 0.5)
        result = one(x)
    return result


def equals_oracle(collective: Any, operation: str, devices: Any, x: Any) -> bool:
    """One call's bits against NumPy."""
    import jax
    import numpy as np

    from jaxdp.tree import tree_sum

    result = np.asarray(jax.pmap(getattr(collective, operation), devices=devices)(x))
    host = np.asarray(x)
    if operation == "all_gather":
        expected = np.broadcast_to(host.reshape(-1), result.shape)
    else:
        total = tree_sum(host)
        expected = np.broadcast_to(total, result.shape) if operation == "all_reduce" else total.reshape(result.shape)
    return result.tobytes() == np.ascontiguousarray(expected).tobytes()


if __name__ == "__main__":
    main(parse_options())
