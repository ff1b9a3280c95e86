"""Where servers run: launchers, the lease on a target, the watchdog, the probe and the host key."""
