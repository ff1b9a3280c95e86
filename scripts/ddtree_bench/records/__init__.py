"""What was measured: the append-only store, and the views that the workflow declares as outputs."""
