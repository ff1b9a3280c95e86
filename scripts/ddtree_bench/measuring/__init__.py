"""The commands `measure`, `metrics` and `calibrate`: one load on any endpoint, without a configuration."""
