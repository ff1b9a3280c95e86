"""What tests with the real SGLang server share: the environment's interpreter and the micro models."""

from __future__ import annotations

from pathlib import Path

import pytest
import sglang_server
from trained_models import ModelPair, micro_model


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The interpreter of the environment that has SGLang, the CPU platform and the plugin."""
    return sglang_server.sglang_python()


@pytest.fixture(scope="session")
def plain_model(sglang_python: Path) -> ModelPair:
    """The trained micro model with plain attention, and its drafter."""
    return micro_model("plain", sglang_python)
