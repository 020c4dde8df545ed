"""What the trainer asks of a model: an `init`, a `loss`, and optionally `logits` for sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Params = Any  # any pytree of arrays
Batch = Mapping[str, Any]  # {"inputs": int32[B, T], "targets": int32[B, T]}, target -1 is ignored


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as pure functions.

    `init(key) -> params`; `loss(params, batch, key) -> (loss_sum, weight)`, both float32 scalars,
    `weight` being the number of target tokens (targets other than -1); `logits(params, inputs) ->
    float32[B, T, vocab_size]` where sampling is wanted, without dropout. `key` is a JAX PRNG key
    for dropout, a function of shard (or rank) and step; None asks for the evaluation loss, without
    dropout. `with_compute_dtype(name)` gives the same model computing in "float32", "bfloat16" or
    "float16"; None where the model decides that itself. `config` is what a checkpoint records and
    a resume compares: plain JSON values.
    """

    name: str
    init: Callable[[Any], Params]
    loss: Callable[[Params, Batch, Any], tuple[Any, Any]]
    logits: Callable[[Params, Any], Any] | None = None
    vocab_size: int | None = None
    context: int | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    with_compute_dtype: Callable[[str], Model] | None = None
