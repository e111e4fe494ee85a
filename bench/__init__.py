"""Measurements: each file is a program, `python -m bench.NAME`; see bench/README.md."""
