"""Tiny targets and DFlash drafters, trained from a seed, for tests of SGLang on CPUs."""
