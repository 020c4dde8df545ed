"""What a run says of itself: its header, and at its end the loss, a sample, and where its files are."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdp.models import Model
from jaxdp.runs.config import TrainConfig
from jaxdp.runs.files import Files, write_durably
from jaxdp.runs.layout import PLOT_FILE, SAMPLE_FILE
from jaxdp.runs.package import RunPackage
from jaxdp.runs.plot import plot_loss
from jaxdp.runs.sample import generate

if TYPE_CHECKING:
    from jaxdp.training.trainer import DataParallelTrainer

SAMPLE_BYTES = 300
TEMPERATURE = 0.8


def header(config: TrainConfig, package: Path, trainer: DataParallelTrainer, first_step: int) -> list[str]:
    """Model, data, devices and steps, a line each."""
    plan, buckets = trainer.plan, len(trainer.plan.buckets)
    device = trainer.devices[0]
    shards = f", {config.shards} shards" if config.shards else ""
    return [f"model {config.model}: {plan.element_count:,} parameters in {plan.parameter_count} tensors, "
            f"{buckets} bucket{'' if buckets == 1 else 's'}",
            f"data {config.data}, {config.batch} sequences a {'shard' if config.shards else 'device'}",
            f"{trainer.world_size} x {device.platform} ({device.device_kind}){shards}, reducer {config.reducer}",
            f"steps {first_step} to {config.steps}, run package {package}"]


def lines(config: TrainConfig, package: RunPackage, model: Model, last: int, parameters: Any) -> list[str]:
    """The last loss, a sample where `parameters` are given, and the paths of package and plot, which it writes.

    No plot with `--json`, which is for programs: drawing it can take longer than a short run.
    """
    records = package.records()
    said = [f"loss {records[-1]['loss']} after step {last}"]
    if parameters is not None:
        text = generate(model, parameters, prompt=b"", length=SAMPLE_BYTES, temperature=TEMPERATURE, seed=config.seed)
        write_durably(Files(), package.path / SAMPLE_FILE, [text])
        said += ["sample:", text.decode("utf-8", "replace")]
    said.append(f"run package: {package.path}")
    if config.json:
        return said
    if plot_loss(records, package.path / PLOT_FILE, f"{config.model} on {config.data}"):
        return [*said, f"plot: {package.path / PLOT_FILE}"]
    return [*said, "plot: none, for matplotlib is not installed (pip install 'jaxdp[plot]')"]


def stopped(signal_number: int | None, last: int) -> str:
    """Which signal stopped a run, and after which step."""
    return f"stopped by {signal.Signals(signal_number or 0).name} after step {last}, which is saved"


def describe_collective(trainer: DataParallelTrainer) -> dict[str, Any] | None:
    """What reduces the gradients and why, for the manifest; None for the psum reducer."""
    known = trainer.capabilities
    if known is None:
        return None
    return {"backend": known.backend, "transport": known.transport, "transport_reason": known.transport_reason,
            "device_names": known.device_names, "reduction_order": known.reduction_order}
