from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang_cpu_platform import torchvision_window

SOURCE = """
import torchvision.transforms as T
from torchvision.transforms import InterpolationMode, functional
from torchvision.transforms.functional import InterpolationMode
MEAN = 0.5
def resize(image):
    return T.Resize(image)
"""
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here"
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that imports torchvision as SGLang's do, imported through the window."""
    (tmp_path / "wants_torchvision.py").write_text(SOURCE)
    (tmp_path / "wants_it_too.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(torchvision_window, "MODULES", ("wants_torchvision",))
    torchvision_window.install()
    monkeypatch.delitem(sys.modules, "wants_torchvision", raising=False)
    return importlib.import_module("wants_torchvision")


def test_a_named_module_is_imported_without_torchvision(module: ModuleType) -> None:
    assert module.MEAN == 0.5


def test_torchvision_stays_missing_for_everyone_else(module: ModuleType) -> None:
    assert not [name for name in sys.modules if name.split(".")[0] == "torchvision"]
    assert importlib.util.find_spec("torchvision") is None
    with pytest.raises(ModuleNotFoundError, match="torchvision"):
        importlib.import_module("wants_it_too")


def test_a_use_of_what_is_missing_says_why(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"torchvision\.transforms\.Resize: torchvision is not installed"):
        module.resize(None)


def test_installing_twice_puts_one_finder(module: ModuleType) -> None:
    torchvision_window.install()
    assert sum(isinstance(finder, torchvision_window._Finder) for finder in sys.meta_path) == 1
