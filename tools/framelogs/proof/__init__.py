"""What a frame log must show of its slots' rows; see docs/log-check.md. Knows no file."""
