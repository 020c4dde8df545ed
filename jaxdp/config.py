"""Frozen configuration dataclasses, validated on construction.

This module imports nothing heavy, so that the command line can show its help at once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

from jaxdp.errors import ConfigError

if TYPE_CHECKING:
    import optax

MIB = 1 << 20
WORLD_SIZES = (1, 2, 4, 8)

Reducer = Literal["tree", "psum", "per-parameter"]
UnevenInputsPolicy = Literal["reject", "token-weighted"]
StepMode = Literal["auto", "fused", "staged"]
OnNonFinite = Literal["raise", "skip"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]


def check_integer(field: str, value: object, *, minimum: int) -> None:
    """Raises `ConfigError` unless `value` is an int (no bool, float or text) >= `minimum`."""
    if type(value) is not int or value < minimum:
        raise ConfigError(field, value, f"an integer of at least {minimum}")


def check_number(field: str, value: object, *, above: float | None = None,
                 minimum: float | None = None, below: float | None = None) -> None:
    """Raises `ConfigError` unless `value` is a finite int or float within the limits."""
    limits = [text for text, bound in ((f"above {above}", above), (f"of at least {minimum}", minimum),
                                       (f"below {below}", below)) if bound is not None]
    allowed = " ".join(["a finite number", " and ".join(limits)]).strip()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise ConfigError(field, value, allowed)
    if ((above is not None and not value > above) or (minimum is not None and not value >= minimum)
            or (below is not None and not value < below)):
        raise ConfigError(field, value, allowed)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def check_bool(field: str, value: object) -> None:
    """Raises `ConfigError` unless `value` is True or False."""
    if type(value) is not bool:
        raise ConfigError(field, value, "True or False")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(field, value, "one of " + ", ".join(map(repr, choices)))


def check_world_size(field: str, value: object) -> None:
    """Raises `ConfigError` unless `value` is a world size of one node."""
    if type(value) is not int or value not in WORLD_SIZES:
        raise ConfigError(field, value, "1, 2, 4 or 8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Decoupled weight decay Adam (Loshchilov and Hutter, 2019) as optax implements it.

    `warmup_steps` > 0 ramps the learning rate linearly from 0: update n (counted from 1) uses
    `learning_rate * min(1, (n - 1) / warmup_steps)`. `decay_steps` > 0 then follows a cosine down
    to `minimum_learning_rate` at update `decay_steps + 1`.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    minimum_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, above=0)
        check_number("beta1", self.beta1, minimum=0, below=1)
        check_number("beta2", self.beta2, minimum=0, below=1)
        check_number("epsilon", self.epsilon, above=0)
        check_number("weight_decay", self.weight_decay, minimum=0)
        check_integer("warmup_steps", self.warmup_steps, minimum=0)
        check_integer("decay_steps", self.decay_steps, minimum=0)
        check_number("minimum_learning_rate", self.minimum_learning_rate, minimum=0)
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise ConfigError("decay_steps", self.decay_steps,
                              f"0 or more than warmup_steps ({self.warmup_steps})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """How a trainer spreads one step over devices. See `docs/api.md` for each field.

    The four fields about buckets, overlap and ready order are checked and have no effect yet: the
    tree sums each gradient where it lies, and keeps no bucket to persist, view or unpack.

    Raises `ConfigError` naming field, value and what is allowed.
    """

    device_indices: tuple[int, ...] = (0,)
    maximum_bucket_bytes: int = 25 * MIB
    optimizer: AdamWConfig | optax.GradientTransformation = dataclasses.field(default_factory=AdamWConfig)
    reducer: Reducer = "tree"
    shards: int | None = None
    uneven_inputs: UnevenInputsPolicy = "reject"
    parameter_check_interval: int = 1
    step_mode: StepMode = "auto"
    persistent_gradient_buckets: bool = False
    gradient_bucket_views: bool = False
    overlap_gradient_communication: bool = False
    record_gradient_ready_order: bool = False
    accumulation_steps: int = 1
    maximum_gradient_norm: float | None = None
    compute_dtype: ComputeDtype = "float32"
    on_nonfinite: OnNonFinite = "raise"
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        self._check_devices()
        check_integer("maximum_bucket_bytes", self.maximum_bucket_bytes, minimum=1)
        check_integer("parameter_check_interval", self.parameter_check_interval, minimum=0)
        check_integer("accumulation_steps", self.accumulation_steps, minimum=1)
        check_number("timeout_s", self.timeout_s, above=0)
        if self.maximum_gradient_norm is not None:
            check_number("maximum_gradient_norm", self.maximum_gradient_norm, above=0)
        check_choice("reducer", self.reducer, ("tree", "psum", "per-parameter"))
        check_choice("uneven_inputs", self.uneven_inputs, ("reject", "token-weighted"))
        check_choice("step_mode", self.step_mode, ("auto", "fused", "staged"))
        check_choice("compute_dtype", self.compute_dtype, ("float32", "bfloat16", "float16"))
        check_choice("on_nonfinite", self.on_nonfinite, ("raise", "skip"))
        for field in ("persistent_gradient_buckets", "gradient_bucket_views",
                      "overlap_gradient_communication", "record_gradient_ready_order"):
            check_bool(field, getattr(self, field))
        self._check_optimizer()
        self._check_shards()

    @property
    def world_size(self) -> int:
        """The number of devices of this process that take part."""
        return len(self.device_indices)

    @property
    def resolved_step_mode(self) -> Literal["fused", "staged"]:
        """`step_mode` with "auto" resolved: staged when `shards` is set, else fused."""
        if self.step_mode == "auto":
            return "fused" if self.shards is None else "staged"
        return self.step_mode

    def _check_devices(self) -> None:
        indices: Any = self.device_indices
        if (not isinstance(indices, tuple) or not all(type(i) is int and i >= 0 for i in indices)
                or len(set(indices)) != len(indices)):
            raise ConfigError("device_indices", indices, "a tuple of distinct integers of at least 0")
        if len(indices) not in WORLD_SIZES:
            raise ConfigError("device_indices", indices, "1, 2, 4 or 8 devices")

    def _check_optimizer(self) -> None:
        optimizer: Any = self.optimizer
        if not isinstance(optimizer, AdamWConfig) and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise ConfigError("optimizer", optimizer, "an AdamWConfig or an optax GradientTransformation")

    def _check_shards(self) -> None:
        if self.shards is None:
            return
        check_integer("shards", self.shards, minimum=1)
        if self.shards & (self.shards - 1) or self.shards % self.world_size:
            raise ConfigError("shards", self.shards,
                              f"a power of two that the world size ({self.world_size}) divides")
        if self.step_mode == "fused":
            raise ConfigError("step_mode", self.step_mode, "'auto' or 'staged' when shards is set")
        if self.reducer != "tree":
            raise ConfigError("reducer", self.reducer, "'tree' when shards is set")
