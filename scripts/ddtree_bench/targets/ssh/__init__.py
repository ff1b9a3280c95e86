"""The launcher for hosts that are reached over SSH, whose servers are systemd units."""
