"""Apply patches to a wheel and pack it again, so that the same wheel and patches give the same bytes everywhere.

Nothing is compressed, since what comes out of a compressor depends on its version.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ddtree_bench.environments.recipes import EnvironmentFailed

STRIP = 2
"""Leading parts of the patches' paths that a wheel does not have: a/python/ in SGLang's repository."""

TAG = "ddtree"
PACKED_AT = (2020, 1, 1, 0, 0, 0)


def patched_wheel(wheel: Path, patches: Sequence[Path], folder: Path) -> Path:
    """Write `wheel` with `patches` applied, in the order given, into `folder`, and return its path.

    Its version gets the local part ddtree.<digest of the patches>, so that nobody takes it for the release. Patches
    are written against the source repository, with paths such as a/python/sglang/srt/server_args.py. Raises
    EnvironmentFailed, which names patch and file, when one does not apply.
    """
    with tempfile.TemporaryDirectory(prefix="patch-") as scratch:
        tree = Path(scratch) / "wheel"
        modes = _unpack(wheel, tree)
        for patch in patches:
            apply(patch, tree, wheel.name)
        version = _retag(tree, _local_version(patches))
        name, _, rest = wheel.name.split("-", 2)
        packed = folder / f"{name}-{version}-{rest}"
        _pack(tree, modes, packed)
    return packed


def apply(patch: Path, tree: Path, name: str) -> None:
    """Apply a patch to the unpacked wheel `name` in `tree`. Raises EnvironmentFailed when it does not apply.

    Git passes silently over files outside of the folder that it runs in when that lies in a repository, so none is
    looked for, and whether the patch is in is asked for afterwards.
    """
    for arguments in (["--check"], [], ["--check", "--reverse"]):
        _git_apply([*arguments, f"-p{STRIP}", str(patch.resolve())], patch, tree, name)


def _git_apply(arguments: Sequence[str], patch: Path, tree: Path, name: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    try:
        result = subprocess.run(
            ["git", "apply", *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise EnvironmentFailed(f"{patch}: needs git, which is not on PATH; install it") from error
    if result.returncode != 0:
        raise EnvironmentFailed(
            f"{patch}: does not apply to {name}: {'; '.join(result.stderr.split(chr(10))).strip('; ')}\n"
            "Make the patch anew for this release, or take it out"
        )


def _local_version(patches: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for patch in patches:
        digest.update(hashlib.sha256(patch.read_bytes()).digest())
    return f"{TAG}.{digest.hexdigest()[:12]}"


def _unpack(wheel: Path, tree: Path) -> dict[str, int]:
    """Unpack a wheel and return the mode of each file that has one, since extracting forgets it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree)
        return {item.filename: item.external_attr >> 16 for item in archive.infolist() if not item.is_dir()}


def _retag(tree: Path, local: str) -> str:
    """Give the unpacked wheel a local version, in its metadata and the names made from it; returns the version."""
    (info,) = tree.glob("*.dist-info")
    metadata = info / "METADATA"
    text = metadata.read_bytes()
    found = re.search(rb"^Version: (\S+)", text, re.MULTILINE)
    if found is None:
        raise EnvironmentFailed(f"{info.name}/METADATA: has no Version, so it is no wheel; download it again")
    version = f"{found[1].decode()}+{local}"
    metadata.write_bytes(text[: found.start(1)] + version.encode() + text[found.end(1) :])
    name = info.name.split("-", 1)[0]
    info.rename(tree / f"{name}-{version}.dist-info")
    return version


def _pack(tree: Path, modes: dict[str, int], packed: Path) -> None:
    (info,) = tree.glob("*.dist-info")
    record = f"{info.name}/RECORD"
    names = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    names = [name for name in names if name != record]
    # Metadata comes last, as the format recommends.
    names.sort(key=lambda name: name.startswith(f"{info.name}/"))
    (tree / record).write_text(_record(tree, names, record), encoding="utf-8", newline="")
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name in (*names, record):
            item = zipfile.ZipInfo(name, PACKED_AT)
            item.create_system = 3
            item.external_attr = (modes.get(name) or 0o100644) << 16
            archive.writestr(item, (tree / name).read_bytes())


def _record(tree: Path, names: Sequence[str], record: str) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name in names:
        content = (tree / name).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(content)))
    writer.writerow((record, "", ""))
    return text.getvalue()
