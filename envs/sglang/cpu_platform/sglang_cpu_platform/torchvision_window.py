"""Imports of two SGLang modules that need torchvision, without torchvision.

`multimodal/internvl_utils.py:5` and `configs/deepseek_ocr.py:7` import it at their top, and every SGLang process
imports both on its way to a text model. They call it only to process images. A window around the execution of just
these two modules puts stand-ins in `sys.modules` and takes them out again, so that everyone else (transformers,
SGLang's image processors) still finds torchvision missing and acts accordingly.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

MODULES = ("sglang.srt.multimodal.internvl_utils", "sglang.srt.configs.deepseek_ocr")


def install() -> None:
    """Let `MODULES` be imported without torchvision. Does nothing where torchvision is installed, or when repeated."""
    if importlib.util.find_spec("torchvision") is not None or any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return spec
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_WindowLoader(fullname, spec.origin)
        )


class _WindowLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with _stand_ins():
            super().exec_module(module)


class _StandIn(ModuleType):
    """A module of torchvision that can be imported and nothing else."""

    def __init__(self, name: str, **members: object) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, loader=None)
        self.__path__: list[str] = []
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"{self.__name__}.{name}: torchvision is not installed, and only text models are served")


class _InterpolationModeStandIn:
    """Imported by name; a use of its members raises AttributeError."""


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Have `torchvision`, `.transforms` and `.transforms.functional` importable inside the block."""
    mode = _InterpolationModeStandIn
    functional = _StandIn("torchvision.transforms.functional", InterpolationMode=mode)
    transforms = _StandIn("torchvision.transforms", functional=functional, InterpolationMode=mode)
    modules = {
        module.__name__: module for module in (_StandIn("torchvision", transforms=transforms), transforms, functional)
    }
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
