"""Tokens of meshes compared with those of the reference."""
