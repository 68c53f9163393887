"""Streams under faults: whether an answer is lost or differs, and how long clients wait."""
