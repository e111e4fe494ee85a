"""Kernels of our own for a CPU: see pipeline.native.library."""
