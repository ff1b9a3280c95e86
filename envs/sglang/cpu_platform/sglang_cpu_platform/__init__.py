"""An SGLang platform that serves on a CPU under Triton's interpreter, for tests only."""

__version__ = "0.1.0"
