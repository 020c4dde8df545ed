"""The safetensors format, with bytes that depend on the tensors and the metadata alone.

The library's own writer may change its layout from release to release; a checkpoint's bytes are
promised, so the layout is fixed here. Any safetensors reader reads the result (a test does).
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

_DTYPE_OF_CODE: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
_HEADER_ALIGNMENT = 8


def encode(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The file's bytes, piece by piece, without a copy of any contiguous tensor.

    Tensors lie in order of falling element size, then in the order given, so that each is aligned
    to its element. Raises `TypeError`, before the first piece, for a dtype the format lacks.
    """
    ordered = _ordered(tensors)
    header = _header(ordered, metadata)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(len(header).to_bytes(8, "little") + header)
        for _, tensor in ordered:
            if tensor.nbytes:
                flat = np.ascontiguousarray(tensor).reshape(-1)
                yield flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8).data

    return pieces()


def encoded_size(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> int:
    """How many bytes `encode` yields."""
    return 8 + len(_header(_ordered(tensors), metadata)) + sum(tensor.nbytes for tensor in tensors.values())


def decode(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors, as read-only views into `data`, and the metadata.

    Raises `ValueError` naming what is wrong with the bytes.
    """
    header, body = _split(data)
    metadata = header.pop("__metadata__", {})
    return {name: _tensor(name, entry, body) for name, entry in header.items()}, metadata


def _ordered(tensors: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    if "__metadata__" in tensors:
        raise TypeError("No tensor may have the name '__metadata__': the format keeps it for itself.")
    return sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)


def _header(ordered: list[tuple[str, np.ndarray]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in ordered:
        code = _CODE_OF_DTYPE.get(tensor.dtype.newbyteorder("="))
        if code is None:
            raise TypeError(f"Tensor {name!r} has dtype {tensor.dtype}; "
                            f"the format holds {', '.join(_DTYPE_OF_CODE)}.")
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return text + b" " * (-len(text) % _HEADER_ALIGNMENT)


def _split(data: bytes) -> tuple[dict, memoryview]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError(f"the file of {len(data)} bytes is shorter than its header")
    header = json.loads(data[8:8 + length])
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header, memoryview(data)[8 + length:]


def _tensor(name: str, entry: dict, body: memoryview) -> np.ndarray:
    try:
        dtype, shape = _DTYPE_OF_CODE[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the header entry of tensor {name!r} is malformed") from error
    if not 0 <= begin <= end <= len(body) or end - begin != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"tensor {name!r} does not fit its bytes {begin} to {end}")
    return np.frombuffer(body[begin:end], dtype=dtype).reshape(shape)
