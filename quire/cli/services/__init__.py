"""What runs `quire serve` in the background: systemd on Linux, launchd on macOS."""
