"""Replay: recorded frames into a fresh core, a real block, or a live ring."""
