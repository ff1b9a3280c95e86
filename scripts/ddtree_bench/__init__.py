"""The measuring side of ddtree-bench: plan, start, load, record and judge speculative decoding servers."""

__version__ = "0.1.0"
