"""Owns `kvring plan`: which stage should hold which layers, by what was measured."""
