"""One training step: what the trainer adds to its own compiled program, and what trust costs.

    python bench/step.py --model bytes-s --world 4 --batch 4 --context 128
    python bench/step.py --model model-s --world 2 --batch 8 --context 512 --platform cuda

Timed in turn, each waited for: `trainer.step` with the strict tree; its compiled program alone, fed
the same batch; the same step with the psum reducer; a plain `pmap` with one `lax.pmean` of all
gradients, written as a user of JAX would; and the audit (fingerprints of all ranks, fetched and
compared).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common


def parse_options() -> argparse.Namespace:
    """One model, world and batch a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bytes-s")
    parser.add_argument("--world", type=int, default=4, choices=(1, 2, 4, 8))
    parser.add_argument("--platform", default="cpu", choices=("cpu", "cuda", "rocm"))
    parser.add_argument("--compute-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    """Runs the bench and prints one line a subject."""
    common.use_platform(options.platform, options.world)
    batches = make_batches(options)
    runs: dict[str, Any] = {}
    tree, psum = (make_trainer(options, reducer) for reducer in ("tree", "psum"))
    counter = iter(range(1, 1_000_000))
    runs["trainer"] = lambda: tree.step(batches, next(counter))
    runs["program"] = program_alone(tree, batches)
    runs["psum"] = lambda: psum.step(batches, next(counter))
    runs["plain"] = plain_pmap(options, batches)
    runs["audit"] = lambda: audit(tree)
    times = common.interleaved(runs, samples=options.samples)
    medians = {name: common.summary_us(values, 1) for name, values in times.items()}
    ratios = {"trainer / program": common.paired_ratio(times["trainer"], times["program"]),
              "program / plain": common.paired_ratio(times["program"], times["plain"]),
              "trainer / plain": common.paired_ratio(times["trainer"], times["plain"]),
              "audit / trainer": common.paired_ratio(times["audit"], times["trainer"])}
    for name, value in medians.items():
        spread = f"(min {value['min'] / 1e3:.2f}, max {value['max'] / 1e3:.2f})"
        print(f"{name:<10}{value['median'] / 1e3:>12.2f} ms  {spread}")
    for name, value in ratios.items():
        print(f"{name:<20}{value:>8.4f}")
    common.write_results(options.output, "step", [{"us": medians, "ratios": ratios}], options={
        key: value for key, value in vars(options).items() if key != "output"})


def make_batches(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One seeded batch a rank."""
    import numpy as np

    from jaxdp import models

    vocabulary = models.get(options.model).vocab_size
    assert vocabulary is not None, "a built-in model has a vocabulary"
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(options.world):
        tokens = generator.integers(0, vocabulary, (options.batch, options.context + 1), np.int32)
        batches.append({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    return batches


def make_trainer(options: argparse.Namespace, reducer: Any) -> Any:
    """A fused trainer of the model."""
    import jaxdp

    config = jaxdp.DataParallelConfig(device_indices=tuple(range(options.world)), reducer=reducer,
                                      compute_dtype=options.compute_dtype)
    return jaxdp.DataParallelTrainer(jaxdp.models.get(options.model), seed=0, config=config)


def program_alone(trainer: Any, batches: list[dict[str, Any]]) -> Any:
    """The trainer's compiled program, called as a bare jitted step is: state in, state out, waited for."""
    import jax

    fused = trainer._step
    return lambda: jax.block_until_ready(fused.run(batches, 1).report["finite"])


def plain_pmap(options: argparse.Namespace, batches: list[dict[str, Any]]) -> Any:
    """pmap, `lax.pmean` of the gradients, optax AdamW, donated state."""
    import jax
    import numpy as np
    import optax

    import jaxdp

    model = jaxdp.models.get(options.model, compute_dtype=options.compute_dtype)
    optimizer = optax.adamw(1e-3, weight_decay=0.0)
    devices = jax.devices()[:options.world]

    def step(state: Any, batch: Any) -> Any:
        params, moments = state

        def mean_loss(p: Any) -> Any:
            total, weight = model.loss(p, batch, None)
            return total / weight

        loss, grads = jax.value_and_grad(mean_loss)(params)
        loss, grads = jax.lax.pmean((loss, grads), "ranks")
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    program = jax.pmap(step, axis_name="ranks", devices=devices, donate_argnums=(0,))
    params = model.init(jax.random.key(0))
    state = jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), (options.world, *x.shape)),
                         (params, optimizer.init(params)))
    stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    held = [state]

    def run() -> None:
        held[0], loss = program(held[0], stacked)
        jax.block_until_ready(loss)

    return run


def audit(trainer: Any) -> None:
    """What a checked step does after its program: fingerprints of every rank, compared on the host."""
    rows = [row.parameters for row in trainer._step.rows]
    assert trainer._auditor.mismatch(rows, trainer._auditor.fingerprints(rows)) is None


if __name__ == "__main__":
    main(parse_options())
