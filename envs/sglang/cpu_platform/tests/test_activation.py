from __future__ import annotations

import sys

import pytest
import torch

from sglang_cpu_platform import activation, torchvision_window


@pytest.fixture(autouse=True)
def cpu_machine_with_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_PLATFORM", "TRITON_INTERPRET", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(activation, "version", lambda name: {"sglang": "0.5.23"}[name])
    monkeypatch.setattr(activation, "_accelerator_available", lambda: False)
    # Another test's import of SGLang may have opened the window.
    shut = [finder for finder in sys.meta_path if not isinstance(finder, torchvision_window._Finder)]
    monkeypatch.setattr(sys, "meta_path", shut)


def _window_installed() -> bool:
    return any(isinstance(finder, torchvision_window._Finder) for finder in sys.meta_path)


def test_the_interpreter_on_a_machine_without_accelerator_activates_the_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert activation.activate() == "sglang_cpu_platform.platform.InterpretedCpuPlatform"


def test_without_the_interpreter_it_stays_out_changes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    recorded = torch.Tensor.record_stream
    assert activation.activate() is None
    assert "needs TRITON_INTERPRET=1" in caplog.text
    assert not _window_installed()
    assert torch.Tensor.record_stream is recorded


def test_an_accelerator_keeps_it_out_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_accelerator_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert activation.activate() is None
    assert not _window_installed()
    monkeypatch.setenv("SGLANG_PLATFORM", activation.ENTRY_POINT)
    assert activation.activate() is not None


def test_asked_for_without_the_interpreter_it_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", activation.ENTRY_POINT)
    with pytest.raises(SystemExit, match=r"^SGLANG_PLATFORM=cpu_interpreter .*set TRITON_INTERPRET=1[^\n]*$"):
        activation.activate()


def test_another_release_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(activation, "version", lambda name: "0.5.24")
    with pytest.raises(SystemExit, match=r"^[^\n]*made for SGLang 0\.5\.23, not for 0\.5\.24: [^\n]*$"):
        activation.activate()
    assert not _window_installed()


def test_the_releases_own_cpu_engine_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(SystemExit, match=r"^SGLANG_USE_CPU_ENGINE=1 [^\n]*unset SGLANG_USE_CPU_ENGINE$"):
        activation.activate()
