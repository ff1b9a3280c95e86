"""Patches: applied to a wheel that is packed again, each time into the same bytes."""

from __future__ import annotations

import base64
import csv
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ddtree_bench.environments import EnvironmentFailed
from ddtree_bench.environments.manifest import Wheel
from ddtree_bench.environments.wheel_patch import patched_wheel

PATCHES = Path(__file__).parents[2] / "envs" / "sglang" / "patches"
BYTES = "82b7a590ba09eca4ae005a660310095e2a24600eceb5ea8cedb79ee048144dee"
"""The sha256 of the wheel of these tests with the patch in it."""

SOURCE = "".join(f"line {n}\n" for n in range(1, 11))
PATCH = """\
diff --git a/python/sglang/srt/args.py b/python/sglang/srt/args.py
--- a/python/sglang/srt/args.py
+++ b/python/sglang/srt/args.py
@@ -2,5 +2,5 @@
 line 2
 line 3
-line 4
+line four
 line 5
 line 6
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "index" / "sglang-1.2-py3-none-any.whl"
    path.parent.mkdir()
    files = {
        "sglang/__init__.py": "",
        "sglang/srt/args.py": SOURCE,
        "sglang/tool.sh": "#!/bin/sh\n",
        "sglang-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 1.2\n\nVersion: of the text\n",
        "sglang-1.2.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "sglang-1.2.dist-info/RECORD": "sglang/srt/args.py,sha256=old,1\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            item = zipfile.ZipInfo(name, (2026, 10, 30, 1, 2, 3))
            item.external_attr = (0o100755 if name.endswith(".sh") else 0o100644) << 16
            archive.writestr(item, content)
    return path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def patched(wheel: Path, folder: Path, *patches: Path) -> Path:
    folder.mkdir()
    return patched_wheel(wheel, patches, folder)


def test_twice_the_same_bytes_with_the_patch_in_them(wheel: Path, tmp_path: Path) -> None:
    patch = write(tmp_path, "0001.patch", PATCH)
    first, second = patched(wheel, tmp_path / "a", patch), patched(wheel, tmp_path / "b", patch)
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert archive.read("sglang/srt/args.py").decode() == SOURCE.replace("line 4", "line four")
        assert archive.getinfo("sglang/tool.sh").external_attr >> 16 == 0o100755


def test_the_bytes_are_the_same_on_every_machine(wheel: Path, tmp_path: Path) -> None:
    made = patched(wheel, tmp_path / "a", write(tmp_path, "0001.patch", PATCH))
    with zipfile.ZipFile(made) as archive:
        assert {item.compress_type for item in archive.infolist()} == {zipfile.ZIP_STORED}
    assert hashlib.sha256(made.read_bytes()).hexdigest() == BYTES


def test_the_version_is_a_local_one_that_tells_the_patches(wheel: Path, tmp_path: Path) -> None:
    patch = write(tmp_path, "0001.patch", PATCH)
    other = write(tmp_path, "0002.patch", PATCH.replace("four", "4.0"))
    made, changed = patched(wheel, tmp_path / "a", patch), patched(wheel, tmp_path / "b", other)
    version = Wheel.of(made).version
    assert version.startswith("1.2+ddtree.") and Wheel.of(changed).version != version
    with zipfile.ZipFile(made) as archive:
        metadata = archive.read(f"sglang-{version}.dist-info/METADATA").decode()
    assert f"\nVersion: {version}\n" in metadata and "\nVersion: of the text\n" in metadata


def test_the_record_is_that_of_the_content(wheel: Path, tmp_path: Path) -> None:
    made = patched(wheel, tmp_path / "a", write(tmp_path, "0001.patch", PATCH))
    with zipfile.ZipFile(made) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith("RECORD"))
        rows = {name: (digest, size) for name, digest, size in csv.reader(archive.read(record).decode().splitlines())}
        assert set(rows) == set(archive.namelist()) and rows.pop(record) == ("", "")
        for name, (digest, size) in rows.items():
            content = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={expected}", str(len(content)))


def test_pip_installs_it(wheel: Path, tmp_path: Path) -> None:
    made = patched(wheel, tmp_path / "a", write(tmp_path, "0001.patch", PATCH))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(tmp_path / "installed"), str(made)], check=True)
    assert "line four" in (tmp_path / "installed" / "sglang" / "srt" / "args.py").read_text()


def test_patches_are_applied_in_order(wheel: Path, tmp_path: Path) -> None:
    first = write(tmp_path, "0001.patch", PATCH)
    second = write(tmp_path, "0002.patch", PATCH.replace("line four", "line FOUR").replace("-line 4", "-line four"))
    made = patched(wheel, tmp_path / "a", first, second)
    with zipfile.ZipFile(made) as archive:
        assert "line FOUR" in archive.read("sglang/srt/args.py").decode()
    with pytest.raises(EnvironmentFailed, match=r"0002\.patch: does not apply"):
        patched(wheel, tmp_path / "b", second, first)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (PATCH.replace("line 3", "line three"), "sglang/srt/args.py"),
        (PATCH.replace("srt/args.py", "srt/gone.py"), "sglang/srt/gone.py"),
        ("no patch at all\n", "No valid patches"),
    ],
)
def test_one_that_does_not_apply_is_named_with_the_file(wheel: Path, tmp_path: Path, text: str, named: str) -> None:
    patch = write(tmp_path, "0001-args.patch", text)
    with pytest.raises(EnvironmentFailed, match=rf"0001-args\.patch: does not apply to {wheel.name}: .*{named}"):
        patched(wheel, tmp_path / "a", patch)
    assert not list((tmp_path / "a").iterdir())


def test_a_repository_around_it_hides_no_file(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a repository git passes over files that are not below the folder it runs in, and calls that success."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = patched(wheel, tmp_path / "a", write(tmp_path, "0001.patch", PATCH))
    with zipfile.ZipFile(made) as archive:
        assert "line four" in archive.read("sglang/srt/args.py").decode()


def test_every_patch_of_the_repository_says_why_it_is_needed() -> None:
    patches, reasons = sorted(PATCHES.glob("*.patch")), (PATCHES / "README.md").read_text()
    assert all(patch.name in reasons for patch in patches)
    assert bool(patches) != ("empty" in reasons)
