"""Owns `kvring doctor`: what keeps a ring from working, found before or after it is set up."""
