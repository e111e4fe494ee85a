"""Decides everything: turns, residency, scheduling, and the HTTP API in front of them."""
