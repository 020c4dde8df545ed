"""Finds training data: a corpus by name, or a file of text or tokens."""

from __future__ import annotations

import hashlib
import pathlib

import numpy as np

from jaxdp.data.corpus import Corpus, WindowSource
from jaxdp.data.kjv import kjv_corpus
from jaxdp.data.ramp import RampCorpus
from jaxdp.data.synthetic import synthetic_corpus
from jaxdp.errors import DataError

NAMES = ("kjv", "synthetic", "ramp")
_CHUNK = 1 << 24  # tokens looked at together: bounds the memory that a mapped file takes


def load_tokens(source: str, *, vocab_size: int, seed: int = 0) -> WindowSource:
    """The data called `source`; every token of it is in [0, vocab_size).

    A name (`kjv`, `synthetic`, `ramp`) comes before a file of that name (write `./kjv`). A file
    that ends in `.bin` holds uint16 little-endian tokens and is memory-mapped; any other file is
    UTF-8 text, its bytes the tokens (vocabulary 256). `seed` is that of `synthetic`. Raises
    `DataError` naming what is wrong: no such file, an odd number of bytes, no tokens, text that is
    not UTF-8, or the first token outside the vocabulary with its position.
    """
    corpus = _load(source, vocab_size, seed)
    if isinstance(corpus, Corpus):
        _check_vocabulary(corpus, vocab_size)
    return corpus


def _load(source: str, vocab_size: int, seed: int) -> WindowSource:
    if source == "kjv":
        return kjv_corpus()
    if source == "synthetic":
        return synthetic_corpus(vocab_size, seed)
    if source == "ramp":
        return RampCorpus(vocab_size)
    path = pathlib.Path(source)
    if not path.is_file():
        raise DataError(f"data {source!r} is no file and no corpus. Give a text file, a .bin file of uint16 "
                        f"tokens, or one of {', '.join(NAMES)}.")
    try:
        return _load_tokens_file(path) if path.suffix == ".bin" else _load_text(path)
    except OSError as error:
        raise DataError(f"data {source!r} cannot be read: {error.strerror}.") from None


def _load_text(path: pathlib.Path) -> Corpus:
    data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"data {str(path)!r} is no UTF-8 text: byte 0x{data[error.start]:02x} at position "
                        f"{error.start}. Tokens belong in a .bin file of uint16.") from None
    return Corpus(str(path), np.frombuffer(data, np.uint8), hashlib.sha256(data).hexdigest(), "text")


def _load_tokens_file(path: pathlib.Path) -> Corpus:
    size = path.stat().st_size
    if size % 2:
        raise DataError(f"data {str(path)!r} has {size} bytes, an odd number; a .bin file holds uint16 tokens, "
                        "two bytes each.")
    tokens = np.memmap(path, "<u2", mode="r") if size else np.empty(0, "<u2")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Corpus(str(path), tokens, digest, "tokens")


def _check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    if len(corpus.tokens) == 0:
        raise DataError(f"data {corpus.name!r} is empty.")
    for start in range(0, len(corpus.tokens), _CHUNK):
        chunk = corpus.tokens[start:start + _CHUNK]
        if int(chunk.max()) < vocab_size:
            continue
        position = int(np.argmax(chunk >= vocab_size))
        raise DataError(f"data {corpus.name!r} has token {int(chunk[position])} at position {start + position}, "
                        f"outside the vocabulary of {vocab_size}. Use a model with a larger one"
                        f"{' (text needs 256)' if corpus.tokens.dtype == np.uint8 else ''}.")
