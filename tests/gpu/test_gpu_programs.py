"""The collectives inside JAX programs on GPUs, one process, against the same oracle as on CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from gpu_support import MODULE, NO_GPU

PROGRAM = r'''
import sys
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, sys.argv[1])
from helpers import assert_bits_equal, cancelling, canary
import jaxdp
from jaxdp.tree import tree_sum

devices = jax.devices()
world = max(w for w in (1, 2, 4, 8) if w <= len(devices))
devices = devices[:world]
with jaxdp.create_deterministic_collective(devices) as c:
    assert c.capabilities.transport == "local", c.capabilities
    for dtype in ("float32", "float16", "bfloat16"):
        for size in (world, 4096 * world, 40960 * world):
            host = cancelling(world, size, dtype)
            x = jax.pmap(lambda v: v, devices=devices)(host)
            r = jax.pmap(lambda v: (c.all_reduce(v), c.reduce_scatter(v), c.all_gather(v)), devices=devices)(x)
            total = tree_sum(host)
            for rank in range(world):
                assert_bits_equal(r[0][rank], total)
                assert_bits_equal(r[1][rank], total.reshape(world, -1)[rank])
                assert_bits_equal(r[2][rank], host.reshape(-1))
            # many calls in one program, several runs: what a captured graph repeats
            def chained(v):
                chain = c.chain()
                for _ in range(20):
                    v = chain.all_reduce_many([v * 0 + v])[0] * 0.5
                return v
            program = jax.pmap(chained, devices=devices)
            expected = host
            for _ in range(20):
                expected = np.broadcast_to(tree_sum(expected) * expected.dtype.type(0.5), expected.shape)
            for _ in range(8):
                assert_bits_equal(program(x)[0], expected[0])
    def loss(v):
        return (c.reduce_scatter(c.all_gather(v)) ** 2).sum()
    grads = jax.pmap(jax.grad(loss), devices=devices)(jnp.ones((world, 6)))
    assert np.isfinite(np.asarray(grads)).all()
print("world", world, devices[0].device_kind, "equal")
'''


@pytest.mark.skipif(MODULE is None, reason=NO_GPU)
def test_programs_on_gpus_have_the_bits_of_tree_sum() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    done = subprocess.run([sys.executable, "-c", PROGRAM, os.path.dirname(os.path.dirname(__file__))], timeout=300,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout
