"""A digest depends on names, shapes, dtypes and bits, on all of them, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import WORLD_SIZES, assert_bits_equal, bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxdp.digest import LANES, digest_hex, fingerprints_numpy, first_difference, leaf_fingerprints, tree_digest

Tree = dict[str, Any]

GOLDEN = "94d10ae6b699eb802e5c94d56499b9e7bcee1dc082ef4cd2ef1b41825021c3bb"  # of weights()


def by_hand(words: list[int]) -> list[int]:
    """The two lanes of one leaf's 32-bit words, in Python's integers."""
    mask, lanes = 0xFFFFFFFF, [0, 0]
    for position, word in enumerate(words):
        a = word ^ (position * 0x9E3779B1 & mask)
        a = (a ^ a >> 16) * 0x7FEB352D & mask
        a = (a ^ a >> 15) * 0x846CA68B & mask
        a ^= a >> 16
        b = (a ^ (position * 0x85EBCA77 & mask)) * 0xC2B2AE3D & mask
        lanes = [lanes[0] + a & mask, lanes[1] + (b ^ b >> 16) & mask]
    return lanes


def sample_tree() -> Tree:
    generator = np.random.default_rng(3)
    tree: Tree = {name: generator.standard_normal((5, 7)).astype(name) for name in ("float32", "float16")}
    tree["bfloat16"] = generator.standard_normal((3, 2, 4)).astype(ml_dtypes.bfloat16)
    tree["float8"] = generator.standard_normal(6).astype(ml_dtypes.float8_e4m3fn)
    tree |= {name: generator.integers(0, 100, 9).astype(name) for name in ("int32", "int8", "uint16", "uint32")}
    return tree | {"bool": np.array([True, False]), "scalar": np.float32(-0.0), "empty": np.zeros((0, 3), np.float32)}


def weights() -> Tree:
    """Two float32 leaves, a bfloat16 one and an integer, each element with another value."""
    return {"q": np.arange(1, 13, dtype=np.float32).reshape(3, 4), "k": np.arange(20, 24, dtype=np.float32),
            "scale": np.array([1, 2, 3], ml_dtypes.bfloat16), "count": np.array(7, np.int32)}


def edited(name: str, edit: Callable[[np.ndarray], None]) -> Tree:
    """`weights()` after `edit` has changed the flat integer bits of one leaf in place."""
    tree = weights()
    raw = bits(tree[name]).reshape(-1)
    edit(raw)
    return tree | {name: raw.view(tree[name].dtype).reshape(tree[name].shape)}


def xor(index: int, mask: int) -> Callable[[np.ndarray], None]:
    return lambda raw: raw.__setitem__(index, raw[index] ^ raw.dtype.type(mask))


def swap(first: int, second: int) -> Callable[[np.ndarray], None]:
    return lambda raw: raw.__setitem__([first, second], raw[[second, first]])


def test_fingerprints_are_the_sums_of_mixed_words_in_plain_integers() -> None:
    tree = sample_tree()
    expected = [by_hand(bits(tree[name]).reshape(-1).tolist()) for name in sorted(tree)]
    assert fingerprints_numpy(tree).tolist() == expected
    assert np.asarray(leaf_fingerprints(jax.device_put(tree))).tolist() == expected


def test_jit_pmap_eager_and_numpy_agree() -> None:
    tree = sample_tree()
    expected = fingerprints_numpy(tree)
    assert_bits_equal(leaf_fingerprints(jax.device_put(tree)), expected)
    assert_bits_equal(jax.jit(leaf_fingerprints)(tree), expected)
    for world_size in WORLD_SIZES:
        ranks = jax.tree.map(lambda leaf, size=world_size: np.stack([leaf] * size), tree)
        devices = jax.devices()[:world_size]
        of_ranks = jax.pmap(leaf_fingerprints, devices=devices)(ranks)
        assert_bits_equal(of_ranks, np.stack([expected] * world_size))


def test_numpy_agrees_beyond_one_chunk_of_its_own() -> None:
    leaf = np.random.default_rng(0).standard_normal((257, 1031)).astype(np.float32)
    assert_bits_equal(fingerprints_numpy(leaf), jax.jit(leaf_fingerprints)(leaf))


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.uint32, st.integers(0, 40)))
def test_any_words_give_the_sums_in_plain_integers(words: np.ndarray) -> None:
    assert fingerprints_numpy(words).tolist() == [by_hand(words.tolist())]


def test_fingerprints_inside_the_program_that_made_the_values_are_those_of_the_result() -> None:
    def update(p: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        p = p * 0.999 - 1e-3 * g / (jnp.sqrt(g * g * 0.3) + 1e-8)
        return p, leaf_fingerprints(p)

    p, g = (jax.random.normal(jax.random.key(seed), (67, 129)) for seed in (0, 1))
    result, fingerprints = jax.jit(update)(p, g)
    assert_bits_equal(fingerprints, fingerprints_numpy(result))


def test_layout_does_not_matter() -> None:
    dense = np.arange(12, dtype=np.float32).reshape(3, 4)
    for view in (np.asfortranarray(dense), np.repeat(dense, 2, axis=1)[:, ::2], dense.astype(">f4")):
        assert tree_digest(view) == tree_digest(dense)
    transposed = np.ascontiguousarray(dense.T)
    assert_bits_equal(jax.jit(lambda x: leaf_fingerprints(x.T))(dense), fingerprints_numpy(transposed))
    assert tree_digest(dense.T) == tree_digest(transposed) == tree_digest(jnp.asarray(dense).T)


def test_device_and_host_trees_have_one_digest() -> None:
    tree = sample_tree()
    assert tree_digest(jax.device_put(tree)) == tree_digest(tree)
    assert tree_digest({}) == tree_digest([])


def test_the_digest_of_a_known_tree_never_changes() -> None:
    assert tree_digest(weights()) == GOLDEN


CHANGES: dict[str, Callable[[], Tree]] = {
    "one ulp": lambda: edited("q", xor(11, 1)),
    "one ulp of bfloat16": lambda: edited("scale", xor(1, 1)),
    "an integer": lambda: weights() | {"count": np.array(8, np.int32)},
    "one sign": lambda: edited("q", xor(0, 1 << 31)),
    "all signs": lambda: weights() | {"q": -weights()["q"]},
    "two elements swapped": lambda: edited("q", swap(2, 9)),
    "transposed": lambda: weights() | {"q": np.ascontiguousarray(weights()["q"].T)},
    "reshaped": lambda: weights() | {"q": weights()["q"].reshape(4, 3)},
    "flattened": lambda: weights() | {"q": weights()["q"].reshape(-1)},
    "other dtype, same bits": lambda: weights() | {"q": weights()["q"].view(np.int32)},
    "other dtype, same values": lambda: weights() | {"k": weights()["k"].astype(np.float64)},
    "renamed": lambda: {{"q": "wq"}.get(name, name): leaf for name, leaf in weights().items()},
    "leaves that change names": lambda: weights() | {"q": weights()["k"], "k": weights()["q"]},
    "a value moved to another leaf": lambda: weights() | {
        "q": np.r_[20, weights()["q"].reshape(-1)[1:]].astype(np.float32).reshape(3, 4),
        "k": np.array([1, 21, 22, 23], np.float32)},
    "a leaf less": lambda: {name: leaf for name, leaf in weights().items() if name != "k"},
    "an empty leaf more": lambda: weights() | {"none": np.zeros(0, np.float32)},
    "empty leaves of other shapes": lambda: weights() | {"none": np.zeros((0, 2), np.float32)},
}


def test_each_change_gives_a_digest_of_its_own() -> None:
    digests = {"unchanged": tree_digest(weights())} | {name: tree_digest(make()) for name, make in CHANGES.items()}
    assert len(set(digests.values())) == len(digests), digests


@pytest.mark.parametrize("patterns", [(0x00000000, 0x80000000), (0x7FC00000, 0x7FC00001), (0x7FC00000, 0xFFC00000),
                                      (0x7F800001, 0x7FC00001), (0x00000000, 0x00000001)])
def test_signs_of_zero_nan_payloads_and_subnormals_count(patterns: tuple[int, int]) -> None:
    one, other = (jnp.asarray(np.array([pattern], np.uint32).view(np.float32)) for pattern in patterns)
    assert (np.asarray(leaf_fingerprints(one)) != np.asarray(leaf_fingerprints(other))).all()


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.uint32, st.integers(1, 30)), st.data())
def test_a_change_of_one_element_always_changes_both_lanes(words: np.ndarray, data: st.DataObject) -> None:
    changed = words.copy()
    changed[data.draw(st.integers(0, len(words) - 1))] ^= np.uint32(data.draw(st.integers(1, 2**32 - 1)))
    assert (fingerprints_numpy(changed) != fingerprints_numpy(words)).all()


@pytest.mark.parametrize("bit", [0, 15, 23, 31])
def test_no_pair_of_flips_of_one_bit_cancels(bit: int) -> None:
    words = np.ones(48, np.float32).view(np.uint32)
    base = fingerprints_numpy(words)
    flipped = np.stack([words] * 48)
    flipped[np.arange(48), np.arange(48)] ^= np.uint32(1 << bit)
    change = fingerprints_numpy(list(flipped)) - base  # mod 2^32
    pairs = change[:, None] + change[None]  # a sum over elements: flipping both adds both changes
    assert not (pairs == 0).all(axis=2).any()


def test_eight_byte_elements_count_in_full_on_host_and_device() -> None:
    wide = {"float64": np.array([1.0, 1.0 + 2**-52]), "int64": np.array([2**40, -1])}
    words = [wide[name].view(np.uint32).tolist() for name in sorted(wide)]
    assert fingerprints_numpy(wide).tolist() == [by_hand(w) for w in words]
    with jax.enable_x64(True):
        on_device = np.asarray(leaf_fingerprints(jax.device_put(wide)))
    assert_bits_equal(on_device, fingerprints_numpy(wide))


@pytest.mark.parametrize("dtype", [np.complex64, ml_dtypes.int4, ml_dtypes.float4_e2m1fn])
def test_other_dtypes_are_refused_on_device_and_host(dtype: Any) -> None:
    leaf = np.zeros(2, dtype)
    for fingerprint in (fingerprints_numpy, lambda tree: leaf_fingerprints(jnp.asarray(tree))):
        with pytest.raises(TypeError, match=rf"bool, integers and floats of 1, 2, 4 or 8 bytes; got {leaf.dtype}"):
            fingerprint(leaf)


def test_a_prng_key_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a digest takes bool, integers and floats"):
        leaf_fingerprints(jax.random.key(0))


def test_the_order_in_which_leaves_are_listed_does_not_matter() -> None:
    lanes = np.arange(4, dtype=np.uint32).reshape(2, LANES)
    forward = digest_hex(["a", "b"], [(1,), (2, 3)], [np.float32, np.int32], lanes)
    assert forward == digest_hex(["b", "a"], [(2, 3), [1]], ["int32", "float32"], jnp.asarray(lanes[::-1]))
    assert forward != digest_hex(["a", "b"], [(1,), (2, 3)], [np.float32, np.int32], lanes[::-1])


def test_a_repeated_name_or_a_missing_fingerprint_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one row for each distinct name; got shape \(2, 2\) for 2 names"):
        digest_hex(["a", "a"], [(), ()], ["bool", "bool"], np.zeros((2, LANES)))
    with pytest.raises(ValueError, match=r"got shape \(1, 2\) for 2 names"):
        digest_hex(["a", "b"], [(), ()], ["bool", "bool"], np.zeros((1, LANES)))


def test_the_first_difference_is_the_first_leaf_then_the_first_rank() -> None:
    fingerprints = np.zeros((4, 3, LANES), np.uint32)
    assert first_difference(fingerprints) is None
    fingerprints[1, 2, 0] = 1
    fingerprints[3, 1, 1] = 1
    assert first_difference(fingerprints) == (1, 3)
    fingerprints[2, 1, 0] = 5
    assert first_difference(jnp.asarray(fingerprints)) == (1, 2)
    assert first_difference(fingerprints[:1]) is None
    assert first_difference(np.zeros((2, 0, LANES), np.uint32)) is None


def test_the_audit_names_the_leaf_and_rank_of_one_flipped_bit() -> None:
    ranks = jax.tree.map(lambda leaf: np.stack([leaf] * 4), weights())
    ranks["scale"][2, 1] = np.nextafter(ranks["scale"][2, 1], ml_dtypes.bfloat16(9))
    fingerprints = jax.pmap(leaf_fingerprints, devices=jax.devices()[:4])(ranks)
    assert first_difference(fingerprints) == (sorted(ranks).index("scale"), 2)
