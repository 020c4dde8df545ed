"""Models by name: the presets, their validation, and a user's own."""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import pytest
from helpers import run_python

from jaxdp import models
from jaxdp.buckets import plan_buckets
from jaxdp.errors import ConfigError
from jaxdp.leaves import leaf_names
from jaxdp.models.presets import PRESETS

MIB = 1 << 20
LAYER = ("attention_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down")


def parameter_shapes(name: str, **overrides: object) -> object:
    return jax.eval_shape(models.get(name, **overrides).init, jax.random.key(0))


@pytest.mark.parametrize(("name", "layers", "elements", "tensors"), [
    ("tiny", 1, 728, 12), ("model-s", 6, 15_586_176, 57), ("bytes-s", 4, 857_216, 39),
    ("gpt2-124m", 12, 162_220_800, 111)])
def test_parameters_have_the_contract_s_names_in_canonical_order(
        name: str, layers: int, elements: int, tensors: int) -> None:
    shapes = parameter_shapes(name)
    leaves = jax.tree.leaves(shapes)
    expected = ["token_embedding", *(f"layers/{i}/{part}" for i in range(layers) for part in LAYER),
                "final_norm", "output_head"]
    assert list(leaf_names(shapes)) == expected
    assert (sum(leaf.size for leaf in leaves), len(leaves)) == (elements, tensors)
    assert {str(leaf.dtype) for leaf in leaves} == {"float32"}
    assert sum(leaf.size for leaf in leaves if leaf.ndim == 2) == PRESETS[name].matrix_elements


def test_matrices_are_in_by_out_and_grouped_heads_narrow_only_k_and_v() -> None:
    shapes = dict(zip(leaf_names(parameter_shapes("tiny")),
                      [leaf.shape for leaf in jax.tree.leaves(parameter_shapes("tiny"))], strict=True))
    assert shapes == {
        "token_embedding": (8, 8), "layers/0/attention_norm": (8,), "layers/0/q": (8, 8), "layers/0/k": (8, 4),
        "layers/0/v": (8, 4), "layers/0/o": (8, 8), "layers/0/ffn_norm": (8,), "layers/0/gate": (8, 16),
        "layers/0/up": (8, 16), "layers/0/down": (16, 8), "final_norm": (8,), "output_head": (8, 8)}


@pytest.mark.parametrize(("name", "bucket_bytes", "buckets"), [
    ("model-s", MIB, 45), ("model-s", 4 * MIB, 12), ("model-s", 25 * MIB, 3), ("tiny", 4096, 1)])
def test_canonical_order_gives_the_contract_s_bucket_counts(name: str, bucket_bytes: int, buckets: int) -> None:
    assert len(plan_buckets(parameter_shapes(name), bucket_bytes).buckets) == buckets


def test_a_name_that_is_no_model_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match=r"model must be one of tiny, model-s, bytes-s, gpt2-124m, .*'nosuch'"):
        models.get("nosuch")
    assert models.names() == ("tiny", "model-s", "bytes-s", "gpt2-124m")


def test_overrides_change_the_named_fields_and_none_changes_nothing() -> None:
    model = models.get("tiny", context=9, vocab_size=11, dropout=None)
    assert (model.context, model.vocab_size, model.config["dropout"]) == (9, 11, 0.0)
    with pytest.raises(ConfigError, match="depth=3"):
        models.get("tiny", depth=3)


def test_the_recorded_configuration_is_plain_json_and_tells_compute_dtypes_apart() -> None:
    model = models.get("tiny")
    assert json.loads(json.dumps(model.config)) == model.config
    assert model.with_compute_dtype is not None
    other = model.with_compute_dtype("bfloat16")
    assert (other.config["compute_dtype"], other.name) == ("bfloat16", "tiny")
    assert {**other.config, "compute_dtype": "float32"} == model.config


@pytest.mark.parametrize(("field", "value"), [
    ("vocab_size", 0), ("dim", True), ("layers", 1.0), ("heads", -1), ("kv_heads", "1"), ("ffn_dim", 0), ("context", 0),
    ("dropout", 1.0), ("dropout", -0.1), ("dropout", True), ("compute_dtype", "float64"), ("one_hot_vocab_limit", -1),
    ("dim", 10), ("heads", 3), ("kv_heads", 3)])
def test_a_shape_that_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        models.get("tiny", **{field: value})
    assert caught.value.field in (field, "dim")
    assert repr(caught.value.value) in str(caught.value)


def test_names_and_configurations_load_neither_jax_nor_flax() -> None:
    run_python("import sys, jaxdp.models as models; models.names(); models.DecoderConfig; models.Model\n"
               "assert not {'jax', 'flax'} & set(sys.modules)")


USER_MODULE = """
import jaxdp.models
ready = jaxdp.models.get("tiny")
def factory(): return jaxdp.models.get("tiny", context=7)
def wrong(): return 3
def broken(): raise RuntimeError("inside the user's code")
own = jaxdp.models.Model("own", init=lambda key: {}, loss=lambda params, batch, key: (0.0, 0.0))
"""


@pytest.fixture
def user_module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    (tmp_path / f"{name}_needs.py").write_text("import absent_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    return name


def test_a_user_s_model_or_factory_is_found_in_the_working_directory(user_module: str) -> None:
    assert models.get(f"{user_module}:ready").context == 4
    assert models.get(f"{user_module}:factory", compute_dtype="bfloat16").config["compute_dtype"] == "bfloat16"
    assert models.get(f"{user_module}:own", compute_dtype="float32").name == "own"


@pytest.mark.parametrize(("suffix", "allowed"), [
    (":absent", "an attribute"), (":wrong", "not int"), ("_absent:x", "no module"), (".sub:x", "no module")])
def test_what_is_no_model_is_refused_by_name(user_module: str, suffix: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"model must be .*{allowed}.*{user_module}{suffix}"):
        models.get(user_module + suffix)


def test_overrides_that_a_user_s_model_cannot_take_are_refused(user_module: str) -> None:
    with pytest.raises(ConfigError, match=r"context .*'tiny'"):
        models.get(f"{user_module}:ready", context=8)
    with pytest.raises(ConfigError, match="compute_dtype must be 'float32' for the model 'own'"):
        models.get(f"{user_module}:own", compute_dtype="bfloat16")


def test_a_user_s_own_errors_pass_unchanged(user_module: str) -> None:
    with pytest.raises(RuntimeError, match="inside the user's code"):
        models.get(f"{user_module}:broken")
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        models.get(f"{user_module}_needs:x")
