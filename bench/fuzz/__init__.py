"""Hostile input by the million: frames, and what the cores do with those that are well formed."""
