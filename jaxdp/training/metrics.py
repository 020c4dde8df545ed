"""What one step reports."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """The record of one step. Times are in milliseconds; what a step mode cannot know is None.

    `loss` is the summed loss over the summed target tokens of all ranks; a rank without a token has
    None in `rank_losses`. `gradient_norm` is the L2 norm of the mean gradient before clipping.
    `parameter_check` is "skipped" when the interval left it out, and then
    `maximum_parameter_difference` is None. `update` is "skipped" when a non-finite gradient left
    parameters and optimizer state as they were. `total_ms` does not include `compile_ms`, which is
    None unless the step compiled something.
    """

    step: int
    loss: float
    rank_losses: tuple[float | None, ...]
    tokens: int
    rank_tokens: tuple[int, ...]
    learning_rate: float | None
    gradient_norm: float
    bucket_count: int
    parameter_count: int
    element_count: int
    forward_backward_ms: float | None
    communication_ms: float | None
    optimizer_ms: float | None
    verification_ms: float | None
    total_ms: float
    parameter_check: Literal["ok", "mismatch", "skipped"]
    maximum_parameter_difference: float | None
    gradient_digest: str
    parameter_digest: str
    peak_device_bytes: int | None
    update: Literal["applied", "skipped"] = "applied"
    compile_ms: float | None = None
