"""The simulator: whole rings in one heap of events, with faults, against outside checkers."""
