"""The command line and everything a person runs."""
