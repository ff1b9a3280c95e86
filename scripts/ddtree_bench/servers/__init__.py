"""What is asked of a running server: its command line, readiness, identity, flush and counters."""
