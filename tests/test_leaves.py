"""Leaf names are readable, unique and tell every path of a tree from every other."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.leaves import LeafSpec, leaf_names, leaf_specs


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    q: Any
    k: Any


@jax.tree_util.register_pytree_with_keys_class
class Twin:
    """A custom node that gives both its children one key."""

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey("x")
        return ((key, 1), (key, 2)), None

    @classmethod
    def tree_unflatten(cls, _: None, __: Any) -> Twin:
        return cls()


def test_names_are_paths_in_flatten_order() -> None:
    tree = {"layers": [Block(q=1, k=2), Block(q=3, k=4)], "embedding": (5,)}
    assert leaf_names(tree) == ("embedding/0", "layers/0/q", "layers/0/k", "layers/1/q", "layers/1/k")


def test_a_key_that_holds_a_slash_differs_from_a_nested_key() -> None:
    assert leaf_names({"a": {"b": 0}, "a/b": 1, "a~1b": 2}) == ("a/b", "a~1b", "a~01b")


def test_text_keys_differ_from_integer_keys_of_the_same_look() -> None:
    tree = collections.OrderedDict([(0, 1), ("0", 2), (-1, 3), ("-1", 4), ("", 5), ("~20", 6), (True, 7), (2.5, 8)])
    assert leaf_names(tree) == ("0", "~20", "-1", "~2-1", "~2", "~020", "~3True", "~32.5")


def test_integer_keys_are_numbered_and_not_reordered_as_text() -> None:
    assert leaf_names({10: 0, 2: 0, 0: 0}) == ("0", "2", "10")


def test_a_tree_that_is_one_leaf_and_a_non_ascii_key() -> None:
    assert leaf_names(3.0) == ("",)
    assert leaf_names({"Übung 数据": 1, "": {"": 2}}) == ("~2/~2", "Übung 数据")
    assert leaf_names({}) == ()


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'twin/x' names several"):
        leaf_names({"twin": Twin()})


def test_specs_are_equal_for_arrays_structs_and_tracers() -> None:
    arrays = {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": jnp.int32(4), "c": jnp.zeros((0, 5))}
    expected = (LeafSpec(0, "a", (2, 3), np.dtype(jnp.bfloat16)), LeafSpec(1, "b", (), np.dtype(np.int32)),
                LeafSpec(2, "c", (0, 5), np.dtype(np.float32)))
    traced: list[tuple[LeafSpec, ...]] = []
    structs = jax.eval_shape(lambda tree: traced.append(leaf_specs(tree)) or tree, arrays)
    assert leaf_specs(arrays) == leaf_specs(structs) == leaf_specs(jax.device_get(arrays)) == traced[0] == expected
    assert [(leaf.elements, leaf.bytes) for leaf in expected] == [(6, 12), (1, 4), (0, 0)]


def test_a_leaf_that_is_no_array_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'scale' is float"):
        leaf_specs({"scale": 1.0})
