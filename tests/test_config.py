"""Every configuration value that is not allowed is refused by field, value and what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax
import pytest
from helpers import run_python

from jaxdp.config import (
    MIB,
    AdamWConfig,
    DataParallelConfig,
    check_bool,
    check_choice,
    check_integer,
    check_number,
    check_world_size,
)
from jaxdp.errors import BadUse, ConfigError

INTEGER_FIELDS = {"maximum_bucket_bytes": 1, "parameter_check_interval": 0, "accumulation_steps": 1, "shards": 1}
NUMBER_FIELDS = ("timeout_s", "maximum_gradient_norm")
CHOICE_FIELDS = ("reducer", "uneven_inputs", "step_mode", "compute_dtype", "on_nonfinite")
BOOL_FIELDS = ("persistent_gradient_buckets", "gradient_bucket_views", "overlap_gradient_communication",
               "record_gradient_ready_order")


def refusal(config: type, **values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        config(**values)
    return raised.value


def configured(field: str, value: Any) -> Any:
    """The value of one field as a configuration that was made with it holds it."""
    values: dict[str, Any] = {field: value}
    return getattr(DataParallelConfig(**values), field)


def assert_refused(config: type, field: str, value: Any) -> None:
    error = refusal(config, **{field: value})
    assert (error.field, error.value) == (field, value)
    assert str(error) == f"{field} must be {error.allowed}; got {value!r}."


def test_the_defaults_are_those_that_are_promised() -> None:
    config = DataParallelConfig()
    assert config == DataParallelConfig(
        device_indices=(0,), maximum_bucket_bytes=25 * MIB, optimizer=AdamWConfig(), reducer="tree", shards=None,
        uneven_inputs="reject", parameter_check_interval=1, step_mode="auto", on_nonfinite="raise",
        accumulation_steps=1, maximum_gradient_norm=None, compute_dtype="float32", timeout_s=30.0)
    assert not any(getattr(config, field) for field in BOOL_FIELDS)
    assert MIB == 1024 * 1024


def test_the_fields_are_those_that_are_promised() -> None:
    """Freezes the options: a new field needs its line in the documents, and its tests."""
    assert {field.name for field in dataclasses.fields(DataParallelConfig)} == {
        "device_indices", "optimizer", *INTEGER_FIELDS, *NUMBER_FIELDS, *CHOICE_FIELDS, *BOOL_FIELDS}
    assert {field.name for field in dataclasses.fields(AdamWConfig)} == {
        "learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "warmup_steps", "decay_steps",
        "minimum_learning_rate"}


@pytest.mark.parametrize("field", INTEGER_FIELDS)
@pytest.mark.parametrize("value", [True, False, -1, 1.0, 0.5, "4", float("nan"), [1]])
def test_an_integer_field_takes_integers_only(field: str, value: Any) -> None:
    assert_refused(DataParallelConfig, field, value)


@pytest.mark.parametrize(("field", "minimum"), INTEGER_FIELDS.items())
def test_an_integer_field_takes_its_minimum_and_nothing_below(field: str, minimum: int) -> None:
    assert configured(field, minimum) == minimum
    assert_refused(DataParallelConfig, field, minimum - 1)


@pytest.mark.parametrize("field", NUMBER_FIELDS)
@pytest.mark.parametrize("value", [True, 0, -0.0, -1.5, "1", float("nan"), float("inf"), -float("inf"), 10**400, (1,)])
def test_a_number_field_takes_finite_positive_numbers_only(field: str, value: Any) -> None:
    assert_refused(DataParallelConfig, field, value)
    assert configured(field, 2) == 2
    assert configured(field, 0.5) == 0.5


@pytest.mark.parametrize("field", CHOICE_FIELDS)
@pytest.mark.parametrize("value", ["", "TREE", 0, None, True, ["tree"]])
def test_a_choice_field_takes_its_choices_only(field: str, value: Any) -> None:
    assert_refused(DataParallelConfig, field, value)


def test_a_refused_choice_names_every_choice() -> None:
    assert str(refusal(DataParallelConfig, reducer="ring")) == (
        "reducer must be one of 'tree', 'psum', 'per-parameter'; got 'ring'.")


@pytest.mark.parametrize("field", BOOL_FIELDS)
@pytest.mark.parametrize("value", [0, 1, None, "False", "true"])
def test_a_bool_field_takes_true_and_false_only(field: str, value: Any) -> None:
    assert_refused(DataParallelConfig, field, value)
    assert configured(field, True) is True


@pytest.mark.parametrize("value", [(), (0, 1, 2), (0, 0), (-1,), (True,), (0.0,), ("0",), [0], 0, None,
                                   tuple(range(16))])
def test_devices_that_are_no_world_of_distinct_indices_are_refused(value: Any) -> None:
    assert_refused(DataParallelConfig, "device_indices", value)


@pytest.mark.parametrize("indices", [(3,), (1, 0), (0, 2, 4, 6), tuple(range(8))])
def test_one_two_four_or_eight_distinct_devices_in_any_order_are_taken(indices: tuple[int, ...]) -> None:
    config = DataParallelConfig(device_indices=indices)
    assert (config.device_indices, config.world_size) == (indices, len(indices))


def test_shards_are_a_power_of_two_that_the_world_divides() -> None:
    for shards in (2, 4, 16):
        assert DataParallelConfig(device_indices=(0, 1), shards=shards).shards == shards
    for shards in (1, 3, 6, 12):
        error = refusal(DataParallelConfig, device_indices=(0, 1), shards=shards)
        assert (error.field, error.value) == ("shards", shards)
        assert "world size (2)" in str(error)


def test_shards_need_the_staged_step_and_the_tree() -> None:
    assert refusal(DataParallelConfig, shards=2, step_mode="fused").field == "step_mode"
    assert refusal(DataParallelConfig, shards=2, reducer="psum").field == "reducer"
    assert refusal(DataParallelConfig, shards=2, reducer="per-parameter").field == "reducer"


def test_auto_is_staged_exactly_when_shards_are_set() -> None:
    assert DataParallelConfig().resolved_step_mode == "fused"
    assert DataParallelConfig(shards=2).resolved_step_mode == "staged"
    assert DataParallelConfig(step_mode="staged").resolved_step_mode == "staged"
    assert DataParallelConfig(step_mode="fused").resolved_step_mode == "fused"


def test_the_optimizer_is_adamw_or_any_optax_transformation() -> None:
    for optimizer in (AdamWConfig(learning_rate=0.5), optax.sgd(0.1), optax.chain(optax.clip(1.0), optax.adam(1e-3))):
        assert DataParallelConfig(optimizer=optimizer).optimizer is optimizer
    for value in ("adamw", None, 1e-3, AdamWConfig):
        assert_refused(DataParallelConfig, "optimizer", value)


@pytest.mark.parametrize(("field", "value"), [
    ("learning_rate", 0), ("learning_rate", True), ("learning_rate", float("nan")), ("learning_rate", "1e-3"),
    ("beta1", 1), ("beta1", -0.1), ("beta2", 1.0), ("epsilon", 0.0), ("weight_decay", -1e-9),
    ("warmup_steps", -1), ("warmup_steps", 1.0), ("decay_steps", True), ("minimum_learning_rate", -1.0)])
def test_adamw_values_out_of_range_are_refused(field: str, value: Any) -> None:
    assert_refused(AdamWConfig, field, value)


def test_adamw_takes_the_ends_of_its_ranges() -> None:
    config = AdamWConfig(beta1=0, beta2=0.0, weight_decay=0, warmup_steps=0, decay_steps=0, minimum_learning_rate=0)
    assert config.beta1 == 0


def test_decay_ends_after_warmup() -> None:
    assert AdamWConfig(warmup_steps=5, decay_steps=6).decay_steps == 6
    error = refusal(AdamWConfig, warmup_steps=5, decay_steps=5)
    assert str(error) == "decay_steps must be 0 or more than warmup_steps (5); got 5."


def test_configurations_are_frozen_and_take_names_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DataParallelConfig().shards = 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        AdamWConfig(1e-3)  # pyright: ignore[reportCallIssue]


def test_a_replaced_field_is_checked_again() -> None:
    with pytest.raises(ConfigError, match=r"^maximum_bucket_bytes must be"):
        dataclasses.replace(DataParallelConfig(), maximum_bucket_bytes=0)


def test_checks_say_what_is_allowed() -> None:
    cases = [
        (lambda: check_integer("n", 2, minimum=3), "n must be an integer of at least 3; got 2."),
        (lambda: check_number("x", 2.0, minimum=0, below=1),
         "x must be a finite number of at least 0 and below 1; got 2.0."),
        (lambda: check_number("x", 0, above=0), "x must be a finite number above 0; got 0."),
        (lambda: check_number("x", "a"), "x must be a finite number; got 'a'."),
        (lambda: check_bool("flag", 1), "flag must be True or False; got 1."),
        (lambda: check_choice("mode", "c", ("a", "b")), "mode must be one of 'a', 'b'; got 'c'."),
        (lambda: check_world_size("world_size", 3), "world_size must be 1, 2, 4 or 8; got 3."),
        (lambda: check_world_size("world_size", True), "world_size must be 1, 2, 4 or 8; got True."),
    ]
    for check, message in cases:
        with pytest.raises(ConfigError) as raised:
            check()
        assert str(raised.value) == message


def test_a_config_error_is_bad_use_and_a_value_error() -> None:
    assert issubclass(ConfigError, BadUse)
    assert issubclass(ConfigError, ValueError)


def test_importing_the_configuration_loads_nothing_heavy() -> None:
    heavy = "{'jax', 'jaxlib', 'numpy', 'optax', 'flax', 'tyro', 'rich'}"
    done = run_python(f"import sys, jaxdp.config; print(sorted({heavy} & set(sys.modules)))")
    assert done.stdout.strip() == "[]"
