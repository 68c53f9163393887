"""The laboratory: a simulator of meshes, studies of policies, and the commands that use both. ``docs/simulator.md``."""
