"""Reading GGUF files: metadata, and tensors of the types F32, Q4_1 and Q8_0.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little endian). Integers and floats
are packed without padding, strings carry a 64-bit length, tensor data is aligned to `general.alignment`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAGIC = 0x46554747  # "GGUF"
VERSION = 3
BLOCK = 32  # weights per quantised block

F32, Q4_1, Q8_0 = 0, 3, 8
BYTES_PER_BLOCK = {F32: 4 * BLOCK, Q4_1: 20, Q8_0: 34}

# GGUF value type -> struct format; 8 is a string and 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `shape` is row-major (GGUF stores the fastest axis first), `offset` is in bytes."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GGUF:
    """An open GGUF file: `data` is a memory map of the whole file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: np.memmap[Any, np.dtype[np.uint8]]


class _Cursor:
    """A position in the header that moves on with every value read."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.position = 0

    def scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from("<" + fmt, self.buffer, self.position)
        self.position += struct.calcsize("<" + fmt)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.position + length
        value = bytes(self.buffer[self.position : end]).decode("utf-8", "replace")
        self.position = end
        return value

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        element, count = self.scalar("I"), self.scalar("Q")
        if element in (_STRING, _ARRAY):
            return [self.value(element) for _ in range(count)]
        fmt = f"<{count}{_SCALARS[element]}"
        values = list(struct.unpack_from(fmt, self.buffer, self.position))
        self.position += struct.calcsize(fmt)
        return values


def read(path: Path) -> GGUF:
    """Read the header of a GGUF file and map its tensors. Raises ValueError if it is not GGUF version 3."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    cursor = _Cursor(data.data)
    magic, version = cursor.scalar("I"), cursor.scalar("I")
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"{path}: not a GGUF file of version {VERSION} (magic {magic:#x}, version {version})")
    n_tensors, n_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(n_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    headers = []
    for _ in range(n_tensors):
        name = cursor.string()
        dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        headers.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    base = math.ceil(cursor.position / alignment) * alignment
    tensors = {name: TensorInfo(name, shape, kind, base + offset) for name, shape, kind, offset in headers}
    return GGUF(path, metadata, tensors, data)


def load(file: GGUF, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return one tensor, dequantised in fp32 and then cast to `dtype`.

    Raises KeyError if the file has no such tensor and ValueError if its type is none of F32, Q4_1, Q8_0.
    """
    info = file.tensors[name]
    if info.type not in BYTES_PER_BLOCK:
        raise ValueError(f"{file.path}: tensor {name} has type {info.type}; supported are F32, Q4_1 and Q8_0")
    size = math.prod(info.shape) * BYTES_PER_BLOCK[info.type] // BLOCK
    raw = torch.from_numpy(np.array(file.data[info.offset : info.offset + size]))
    return dequantise(raw, info.type, dtype).view(info.shape)


def dequantise(raw: Tensor, kind: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantise bytes (uint8 [n]) of GGUF type `kind`: fp32 values cast to `dtype`, flat.

    Q4_1 is 32 weights in 20 bytes: scale d and minimum m in fp16, then 16 bytes whose low nibbles are weights 0-15
    and whose high nibbles are weights 16-31; w = d q + m. Q8_0 is 34 bytes: scale d in fp16, 32 int8; w = d q.
    """
    if kind == F32:
        return raw.view(torch.float32).to(dtype)
    blocks = raw.view(-1, BYTES_PER_BLOCK[kind])  # [n_blocks, bytes]
    if kind == Q8_0:
        scale = blocks[:, :2].contiguous().view(torch.float16).float()  # [n_blocks, 1]
        return blocks[:, 2:].view(torch.int8).float().mul_(scale).to(dtype).flatten()
    scale_min = blocks[:, :4].contiguous().view(torch.float16).float()  # [n_blocks, 2]
    nibbles = blocks[:, 4:]
    quants = torch.cat([nibbles & 15, nibbles >> 4], 1).float()  # [n_blocks, 32]
    return quants.mul_(scale_min[:, :1]).add_(scale_min[:, 1:]).to(dtype).flatten()
