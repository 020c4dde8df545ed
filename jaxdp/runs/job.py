"""What a run trains: its model, its data, and the identity that a resume must not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdp import data, models
from jaxdp.data import BatchSource, EvaluationBatches
from jaxdp.errors import ConfigError, DataError, ResumeRefused
from jaxdp.models import Model
from jaxdp.runs import strict_json
from jaxdp.runs.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Job:
    """`identity` is plain JSON: two runs with equal identities have equal numbers (with `shards`)."""

    model: Model
    train: BatchSource
    validation: EvaluationBatches | None
    data_sha256: str
    identity: Mapping[str, Any]


def check_names(config: TrainConfig) -> None:
    """Refuses an unknown model or absent data at once, before anything heavy is imported."""
    if ":" not in config.model and config.model not in models.names():
        raise ConfigError("model", config.model, f"one of {', '.join(models.names())}, or module:attribute")
    if config.data not in data.NAMES and not Path(config.data).is_file():
        raise DataError(f"--data {config.data!r} is no file and no corpus. Give a text file, a .bin file of uint16 "
                        f"tokens, or one of {', '.join(data.NAMES)}.")


def prepare(config: TrainConfig) -> Job:
    """Makes the model and loads the data. Imports JAX. Raises `ConfigError` or `DataError`."""
    model = models.get(config.model)
    vocab_size, context = _vocab_size(model), _context(config, model)
    corpus = data.load_tokens(config.data, vocab_size=vocab_size, seed=config.seed)
    sha256 = corpus.sha256
    shuffle = corpus.kind != "ramp"  # the ramp's windows have an order of their own
    held_out = None
    if config.validation_fraction:
        corpus, held_out = data.split(corpus, context=context, validation_fraction=config.validation_fraction)
    train = BatchSource(corpus=corpus, context=context, sequences=config.batch, seed=config.seed, shuffle=shuffle)
    described = {"kind": corpus.kind, "sha256": sha256, "context": context, "sequences": config.batch,
                 "shuffle": shuffle, "validation_fraction": config.validation_fraction}
    return Job(model, train, _validation(config, held_out, context), sha256, _identity(config, model, described))


def refuse_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises `ResumeRefused` unless both identities are equal, naming what differs with both values."""
    differences = list(_differences("", strict_json.to_plain(saved), strict_json.to_plain(current)))
    if differences:
        raise ResumeRefused(f"A resume must not change {'; '.join(differences)}. "
                            f"Give the values of the checkpoint, or start a new run in another --output.")


def _identity(config: TrainConfig, model: Model, described_data: Mapping[str, Any]) -> dict[str, Any]:
    step = {name: getattr(config, name) for name in ("accumulation_steps", "maximum_gradient_norm", "compute_dtype",
                                                     "uneven_inputs", "on_nonfinite")}
    return {"model": {"name": model.name, **model.config}, "data": dict(described_data),
            "optimizer": dataclasses.asdict(config.optimizer()), "step": step,
            "seed": config.seed, "shards": config.shards}


def _vocab_size(model: Model) -> int:
    if model.vocab_size is None:
        raise ConfigError("model", model.name, "a model with a vocab_size, which its data is checked against")
    return model.vocab_size


def _context(config: TrainConfig, model: Model) -> int:
    if config.context is None and model.context is None:
        raise ConfigError("context", None, f"given for the model {model.name}, which names none of its own")
    if config.context is not None and model.context is not None and config.context > model.context:
        raise ConfigError("context", config.context, f"at most {model.context}, the longest of the model {model.name}")
    return config.context or model.context or 0


def _validation(config: TrainConfig, corpus: Any, context: int) -> EvaluationBatches | None:
    if not config.eval_every:
        return None
    if corpus is None:
        raise DataError(f"data {config.data!r} is too short to hold {context + 1} tokens out for --eval-every. "
                        f"Give more data or a shorter --context.")
    if config.eval_sequences and isinstance(corpus, data.Corpus):
        corpus = dataclasses.replace(corpus, tokens=corpus.tokens[:config.eval_sequences * context + 1])
    return EvaluationBatches(corpus=corpus, context=context, sequences=config.batch)


def _differences(path: str, saved: Any, current: Any) -> list[str]:
    if isinstance(saved, dict) and isinstance(current, dict):
        return [difference for key in sorted({*saved, *current})
                for difference in _differences(f"{path}.{key}".lstrip("."), saved.get(key), current.get(key))]
    return [] if saved == current else [f"{path} (checkpoint: {saved!r}, now: {current!r})"]
