from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from ddtree_reference import assets, gguf


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float16)[0])


def scalar_dequantise(raw: bytes, kind: int) -> list[np.float32]:
    """One weight at a time, as the format is described."""
    f = np.float32
    if kind == gguf.F32:
        return [f(x) for (x,) in struct.iter_unpack("<f", raw)]
    size, out = gguf.BYTES_PER_BLOCK[kind], []
    for at in range(0, len(raw), size):
        block = raw[at : at + size]
        scale = f(half(block[:2]))
        if kind == gguf.Q8_0:
            out += [f(q) * scale for (q,) in struct.iter_unpack("<b", block[2:])]
        else:
            minimum = f(half(block[2:4]))
            low = [f(byte & 15) * scale + minimum for byte in block[4:]]
            out += low + [f(byte >> 4) * scale + minimum for byte in block[4:]]
    return out


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def write_gguf(path: Path, tensors: dict[str, tuple[tuple[int, ...], int, bytes]], version: int = 3) -> None:
    metadata = [
        string("name") + struct.pack("<I", 8) + string("tiny ü"),
        string("count") + struct.pack("<II", 4, 7),
        string("rates") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 0.25),
        string("words") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("bc"),
    ]
    header, offset, data = b"", 0, b""
    for name, (shape, kind, raw) in tensors.items():
        dims = tuple(reversed(shape))
        header += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        data += raw + b"\0" * (-len(raw) % 32)
        offset = len(data)
    head = struct.pack("<IIQQ", gguf.MAGIC, version, len(tensors), len(metadata)) + b"".join(metadata) + header
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def random_blocks(kind: int, blocks: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    if kind == gguf.F32:
        return rng.standard_normal(blocks * gguf.BLOCK).astype(np.float32).tobytes()
    scales = 1 if kind == gguf.Q8_0 else 2
    return b"".join(
        rng.standard_normal(scales).astype(np.float16).tobytes() + rng.bytes(gguf.BYTES_PER_BLOCK[kind] - 2 * scales)
        for _ in range(blocks)
    )


@pytest.mark.parametrize("kind", [gguf.F32, gguf.Q4_1, gguf.Q8_0])
def test_tensors_equal_the_scalar_dequantisation(kind: int, tmp_path: Path) -> None:
    first, second = random_blocks(kind, 6, 1), random_blocks(kind, 2, 2)
    write_gguf(tmp_path / "m.gguf", {"a": ((3, 64), kind, first), "b": ((64,), kind, second)})
    file = gguf.read(tmp_path / "m.gguf")
    for name, shape, raw in (("a", (3, 64), first), ("b", (64,), second)):
        expected = torch.tensor(np.array(scalar_dequantise(raw, kind))).view(shape)
        assert torch.equal(gguf.load(file, name), expected)
        assert torch.equal(gguf.load(file, name, torch.bfloat16), expected.bfloat16())


def test_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {})
    metadata = gguf.read(tmp_path / "m.gguf").metadata
    assert metadata == {"name": "tiny ü", "count": 7, "rates": [0.5, 0.25], "words": ["a", "bc"]}


def test_the_model_file_has_the_tensors_it_should() -> None:
    file = gguf.read(assets.weight_files("smollm2")["model"])
    assert len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
    info = file.tensors["blk.17.ffn_down.weight"]
    raw = bytes(file.data[info.offset : info.offset + 20 * 48])
    row = torch.tensor(np.array(scalar_dequantise(raw, info.type)))
    assert torch.equal(gguf.load(file, info.name)[0, : row.numel()], row[:1536])


def test_errors_name_file_and_reason(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + b"\0" * 60)
    with pytest.raises(ValueError, match=r"other\.gguf: not a GGUF file of version 3"):
        gguf.read(other)
    write_gguf(tmp_path / "old.gguf", {}, version=2)
    with pytest.raises(ValueError, match="version 2"):
        gguf.read(tmp_path / "old.gguf")
    write_gguf(tmp_path / "q6.gguf", {"w": ((32,), 14, bytes(32))})
    with pytest.raises(ValueError, match="tensor w has type 14"):
        gguf.load(gguf.read(tmp_path / "q6.gguf"), "w")
