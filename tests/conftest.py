"""What must be so before torch is imported, in every test process and what it starts."""

import os

# Threads that spin while they wait take the cores from those they wait for: with test files beside
# each other on two cores, a random schedule of two threads took 123 s, and without spinning 13 s.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
