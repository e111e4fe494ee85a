"""Bytes and links of the ring: frames, frame logs, sockets, ring.toml. Knows no model."""
