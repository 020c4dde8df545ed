"""Batches of unequal shape: a part's gradient has the same bits whichever parts share its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers import clean_environment

DEADLINE_S = 100
PROGRAM = """
import os, sys
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
import numpy as np, jaxdp

def batch(rows, columns):
    tokens = np.arange(rows * (columns + 1), dtype=np.int32).reshape(rows, columns + 1) % 8
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

batches = [batch(1, 4), batch(3, 2)]
config = jaxdp.DataParallelConfig(device_indices=tuple(range(int(sys.argv[1]))), shards=2,
                                  uneven_inputs="token-weighted", timeout_s=60)
with jaxdp.DataParallelTrainer(jaxdp.models.get("tiny"), seed=0, config=config) as trainer:
    first = int(os.environ.get("RANK", 0)) * trainer.local_parts
    for step in (1, 2):
        metrics = trainer.step(batches[first:first + trainer.local_parts], step)
        print(step, metrics.gradient_digest, metrics.parameter_digest, metrics.loss)
"""


def start(devices: int, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(devices)], env=clean_environment(**changes),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ragged_shards_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Padded to its own process's longest alone, rank 1's shard would come from another program."""
    shared = {"WORLD_SIZE": "2", "JAXDP_RENDEZVOUS": str(tmp_path / "meeting")}
    ranks = [start(1, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(2)]
    processes = [start(2), *ranks]
    try:
        results = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], [error for _, error in results]
    one, *others = [out for out, _ in results]
    assert len(one.splitlines()) == 2
    assert others == [one, one]
