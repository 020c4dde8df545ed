"""What `jaxdp train` takes: validated on construction, without importing JAX."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxdp.config import (
    MIB,
    AdamWConfig,
    ComputeDtype,
    DataParallelConfig,
    OnNonFinite,
    Reducer,
    StepMode,
    UnevenInputsPolicy,
    check_bool,
    check_integer,
    check_number,
    check_world_size,
)
from jaxdp.errors import ConfigError
from jaxdp.runs.flags import Flag

Platform = Literal["auto", "cpu", "rocm", "cuda"]

_MODEL, _DEVICES, _OPTIMIZER, _RUN = "model and data", "devices and reduction", "optimizer", "run and output"
_FIELD_OF_PARAMETER = {"device_indices": "devices", "maximum_bucket_bytes": "bucket_bytes", "timeout_s": "timeout"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Trains a model on one node and leaves a run package: manifest, metrics, trace, checkpoints.

    Every field is a flag of `jaxdp train`. Raises `ConfigError` naming field, value and what is
    allowed.
    """

    model: Annotated[str, Flag(
        "tiny, model-s, bytes-s, gpt2-124m, or module:attribute of your own", _MODEL, metavar="NAME")] = "bytes-s"
    data: Annotated[str, Flag(
        "kjv, synthetic, ramp, a text file (its bytes are the tokens), or a .bin file of uint16 tokens", _MODEL,
        metavar="NAME|PATH")] = "synthetic"
    batch: Annotated[int, Flag("sequences a step on each shard, or on each device without --shards", _MODEL)] = 8
    context: Annotated[int | None, Flag("tokens a sequence (default: the model's longest)", _MODEL)] = None
    validation_fraction: Annotated[float, Flag(
        "the last part of the data, held out for --eval-every; 0 trains on all", _MODEL)] = 0.05
    seed: Annotated[int, Flag("of initial parameters, data order and dropout", _MODEL)] = 0

    devices: Annotated[int, Flag("how many devices: 1, 2, 4 or 8", _DEVICES)] = 1
    platform: Annotated[Platform, Flag("where to run; cpu gives as many devices as asked for", _DEVICES)] = "auto"
    shards: Annotated[int | None, Flag(
        "fixed number of shards of the global batch, a power of two: the same bits at every number of devices up "
        "to it", _DEVICES)] = None
    bucket_bytes: Annotated[int, Flag("most bytes of gradients reduced at once", _DEVICES)] = 25 * MIB
    reducer: Annotated[Reducer, Flag(
        "the strict tree, XLA's psum, or the tree one parameter at a time", _DEVICES)] = "tree"
    step_mode: Annotated[StepMode, Flag("auto is staged with --shards, else fused", _DEVICES)] = "auto"
    parameter_check_interval: Annotated[int, Flag(
        "audit the parameters of all ranks every N steps; 0 never", _DEVICES)] = 1
    uneven_inputs: Annotated[UnevenInputsPolicy, Flag(
        "what to do when ranks hold different numbers of target tokens", _DEVICES)] = "reject"
    persistent_gradient_buckets: Annotated[bool, Flag("no effect yet; see docs/api.md", _DEVICES)] = False
    gradient_bucket_views: Annotated[bool, Flag(
        "no effect yet; see docs/api.md", _DEVICES)] = False
    overlap_gradient_communication: Annotated[bool, Flag(
        "no effect yet; see docs/api.md", _DEVICES)] = False
    record_gradient_ready_order: Annotated[bool, Flag(
        "no effect yet; see docs/api.md", _DEVICES)] = False
    timeout: Annotated[float, Flag(
        "deadline of each wait for a peer, in seconds", _DEVICES, metavar="SECONDS")] = 30.0

    learning_rate: Annotated[float, Flag("AdamW's peak learning rate", _OPTIMIZER)] = 0.001
    weight_decay: Annotated[float, Flag("decoupled, a step and unit of learning rate", _OPTIMIZER)] = 0.0
    beta1: Annotated[float, Flag("decay of the first moment", _OPTIMIZER)] = 0.9
    beta2: Annotated[float, Flag("decay of the second moment", _OPTIMIZER)] = 0.999
    warmup_steps: Annotated[int, Flag("ramp the learning rate linearly from 0", _OPTIMIZER)] = 0
    decay_steps: Annotated[int, Flag(
        "then follow a cosine down until this many updates; 0 stays at the peak", _OPTIMIZER)] = 0
    minimum_learning_rate: Annotated[float, Flag("where the cosine ends", _OPTIMIZER)] = 0.0
    maximum_gradient_norm: Annotated[float | None, Flag(
        "clip the global gradient norm (default: no clipping)", _OPTIMIZER)] = None
    accumulation_steps: Annotated[int, Flag("microbatches a step", _OPTIMIZER)] = 1
    compute_dtype: Annotated[ComputeDtype, Flag(
        "of the matrix products; parameters stay float32", _OPTIMIZER)] = "float32"
    on_nonfinite: Annotated[OnNonFinite, Flag(
        "what to do when a gradient is not finite: stop, or skip the update", _OPTIMIZER)] = "raise"

    steps: Annotated[int, Flag("total steps, those before a resume included", _RUN)] = 100
    output: Annotated[str | None, Flag("folder of the run (default: a new one in runs/)", _RUN, metavar="DIR")] = None
    resume: Annotated[str, Flag(
        "auto goes on from the newest good checkpoint in --output; or the path of a checkpoint; never refuses a "
        "folder that holds a run", _RUN, metavar="{auto,never}|PATH")] = "never"
    checkpoint_every: Annotated[int, Flag(
        "save every N steps; the last step, and the one at which SIGTERM or Ctrl-C stops the run, is saved always",
        _RUN)] = 0
    keep_checkpoints: Annotated[int, Flag("keep only the newest N checkpoints; 0 keeps all", _RUN)] = 0
    checkpoint_timeout: Annotated[float, Flag(
        "how long the other ranks of a ranked run wait for rank 0 to save", _RUN, metavar="SECONDS")] = 600.0
    eval_every: Annotated[int, Flag("validation loss every N steps and at the last; 0 never", _RUN)] = 0
    eval_sequences: Annotated[int, Flag("how many held-out sequences to evaluate; 0 means all", _RUN)] = 0
    sample: Annotated[bool, Flag("print text from the model at the end (byte-level models)", _RUN)] = False
    trace: Annotated[str | None, Flag(
        "write the trace here (default: trace.jsonl in --output)", _RUN, metavar="PATH")] = None
    json: Annotated[bool, Flag("one JSON record a step on stdout instead of the progress display", _RUN)] = False

    def __post_init__(self) -> None:
        check_world_size("devices", self.devices)
        for field, minimum in (("batch", 1), ("steps", 1), ("seed", 0), ("checkpoint_every", 0),
                               ("keep_checkpoints", 0), ("eval_every", 0), ("eval_sequences", 0)):
            check_integer(field, getattr(self, field), minimum=minimum)
        self.data_parallel()
        if self.context is not None:
            check_integer("context", self.context, minimum=1)
        check_number("checkpoint_timeout", self.checkpoint_timeout, above=0)
        check_number("validation_fraction", self.validation_fraction, minimum=0, below=1)
        check_bool("sample", self.sample)
        check_bool("json", self.json)
        for field in ("model", "data", "output", "resume", "trace"):
            if getattr(self, field) == "":
                raise ConfigError(field, "", "text that is not empty")
        if self.batch % self.accumulation_steps:
            raise ConfigError("accumulation_steps", self.accumulation_steps, f"a divisor of batch ({self.batch})")
        if self.eval_every and not self.validation_fraction:
            raise ConfigError("eval_every", self.eval_every, "0 when validation_fraction is 0")
        if self.resume == "auto" and self.output is None:
            raise ConfigError("resume", self.resume, "given together with --output, the run to go on with")

    def optimizer(self) -> AdamWConfig:
        """The optimizer of the run."""
        names = [field.name for field in dataclasses.fields(AdamWConfig) if hasattr(self, field.name)]
        return AdamWConfig(**{name: getattr(self, name) for name in names})

    def data_parallel(self, device_indices: tuple[int, ...] | None = None) -> DataParallelConfig:
        """The trainer's configuration, on the first `devices` devices unless others are named."""
        shared = {field.name for field in dataclasses.fields(DataParallelConfig)} & set(self.as_dict())
        values: dict[str, Any] = {name: getattr(self, name) for name in shared} | {"optimizer": self.optimizer()}
        try:
            return DataParallelConfig(
                device_indices=tuple(range(self.devices)) if device_indices is None else device_indices,
                maximum_bucket_bytes=self.bucket_bytes, timeout_s=self.timeout, **values)
        except ConfigError as error:
            field = _FIELD_OF_PARAMETER.get(error.field, error.field)
            raise ConfigError(field, error.value, error.allowed) from None

    def as_dict(self) -> dict[str, Any]:
        """Field by field, for the manifest."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
