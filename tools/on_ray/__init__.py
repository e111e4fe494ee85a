"""Owns `kvring up --on ray`: stages placed on a Ray cluster; frames still travel by ZeroMQ."""
