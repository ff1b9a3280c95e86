"""A wheelhouse of small packages that stand in for those of the embedded engine: as quick to deploy as can be."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ddtree_bench.environments import manifest, python_tag
from ddtree_bench.environments.manifest import Manifest, Wheel

PACKAGES = ("torch", "tokenizers", "fastapi", "uvicorn")
SERVER = {"ddtree_reference/__init__.py": "", "ddtree_reference/__main__.py": "print('--method {AR,DFLASH,DDTREE}')\n"}


def write_wheel(folder: Path, name: str, files: Mapping[str, str | bytes], tags: str = "py3-none-any") -> Path:
    """Write a wheel of version 1 that pip installs; `tags` are those at the end of its name."""
    info = f"{name}-1.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}\n",
    }
    encoded = {path: text.encode() if isinstance(text, str) else text for path, text in contents.items()}
    record = "".join(f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in encoded.items())
    wheel = folder / f"{name}-1-{tags}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in {**encoded, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(zipfile.ZipInfo(path), content)
    return wheel


def write_wheelhouse(
    folder: Path,
    key: str,
    *,
    files: Mapping[str, str | bytes] | None = None,
    tags: str = "py3-none-any",
    engine: str = "reference",
    build: str = "",
) -> Path:
    """Write a wheelhouse of an environment of which `key`, 64 hex digits, is the key; returns its folder.

    `files` are more of the package `torch`, and `tags` those of its wheel.
    """
    wheels = manifest.wheels_folder(folder)
    wheels.mkdir(parents=True)
    for name in PACKAGES[1:]:
        write_wheel(wheels, name, {f"{name}/__init__.py": ""})
    write_wheel(wheels, "torch", {"torch/__init__.py": "", **(files or {})}, tags)
    write_wheel(wheels, "ddtree_reference", SERVER)
    found = tuple(Wheel.of(path) for path in sorted(wheels.iterdir()))
    Manifest(engine, key, python_tag(), "linux-x86_64", found, {}, {}, build=build).write(folder)
    return folder


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
