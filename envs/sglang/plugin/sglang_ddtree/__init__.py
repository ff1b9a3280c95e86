"""DDTree speculative decoding for SGLang, loaded through SGLang's plugin entry points."""

__version__ = "0.1.0"
