"""The soak: a mixed load on a ring whose processes are killed, against serial truth."""
