"""Strict collectives between processes beside XLA's gloo, in one run on CPU.

    python bench/processes.py --world 4

One process a rank. Both sides run as jitted programs of one call and a multiply, waited for, in turn.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common


def parse_options() -> argparse.Namespace:
    """One world size a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << exponent for exponent in range(12, 27, 2)])
    parser.add_argument("--operations", nargs="+", default=["all_reduce", "all_gather", "reduce_scatter"])
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def launch(options: argparse.Namespace) -> int:
    """Starts one process a rank of this script and waits for them, at most ten minutes."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(options.world), "JAX_PLATFORMS": "cpu", "BENCH_PORT": str(probe.getsockname()[1]),
                  "JAXDP_RENDEZVOUS": str(Path(folder) / "meeting")}
        probe.close()
        ranks = [subprocess.Popen([sys.executable, *sys.argv],
                                  env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                 for rank in range(options.world)]
        try:
            return max(rank.wait(timeout=600) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()


def measure_rank(options: argparse.Namespace) -> None:
    """One rank's part; rank 0 prints and writes."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jaxdp.collectives import create_deterministic_collective

    rank = int(os.environ["RANK"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{os.environ['BENCH_PORT']}", options.world, rank)
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    rows = []
    with create_deterministic_collective(timeout_s=60, capacity_bytes=max(options.sizes) * 2) as collective:
        for operation in options.operations:
            for size in options.sizes:
                times = common.interleaved(both_sides(collective, mesh, operation, size), samples=options.samples)
                rows.append(describe(options, operation, size, times))
                if rank == 0:
                    report(rows[-1])
    if rank == 0:
        common.write_results(options.output, "processes", rows, world=options.world)


def report(row: dict[str, Any]) -> None:
    """One line a row."""
    strict, native = row["strict_us"]["median"], row["native_us"]["median"]
    print(f"{row['operation']:<15}{row['bytes']:>11}  ipc {strict:>10.1f} us  gloo {native:>10.1f} us  "
          f"ratio {row['ratio']:.2f}", flush=True)


def both_sides(collective: Any, mesh: Any, operation: str, size: int) -> dict[str, Any]:
    """The strict program on this rank's device, and gloo's over the mesh."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    elements = size // 4
    local = jax.device_put(np.ones(elements, np.float32), jax.local_devices()[0])
    sharding = NamedSharding(mesh, PartitionSpec("ranks"))
    whole = jax.make_array_from_process_local_data(sharding, np.ones(elements, np.float32), (mesh.size * elements,))
    native_call = {"all_reduce": lambda x: jax.lax.psum(x, "ranks"),
                   "all_gather": lambda x: jax.lax.all_gather(x, "ranks", tiled=True),
                   "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "ranks", tiled=True)}[operation]

    def strict_call(x: Any) -> Any:
        chain = collective.chain()
        if operation == "all_gather":
            return chain.all_gather(x)
        return (chain.all_reduce_many if operation == "all_reduce" else chain.reduce_scatter_many)([x])[0]

    strict = jax.jit(lambda x: strict_call(x * 1.5) * 0.5)
    native = jax.jit(jax.shard_map(lambda x: native_call(x * 1.5) * 0.5, mesh=mesh, in_specs=PartitionSpec("ranks"),
                                   out_specs=PartitionSpec("ranks"), check_vma=False))
    return {"strict": lambda: jax.block_until_ready(strict(local)),
            "native": lambda: jax.block_until_ready(native(whole))}


def describe(options: argparse.Namespace, operation: str, size: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """One row."""
    return {"operation": operation, "bytes": size, "world": options.world,
            "strict_us": common.summary_us(times["strict"], 1), "native_us": common.summary_us(times["native"], 1),
            "ratio": common.paired_ratio(times["strict"], times["native"])}


if __name__ == "__main__":
    parsed = parse_options()
    if "RANK" in os.environ:
        measure_rank(parsed)
    else:
        sys.exit(launch(parsed))
