"""The embedded reference engine: SmolLM2-135M on a CPU with AR, DFLASH and DDTREE decoding."""

__version__ = "0.1.0"
