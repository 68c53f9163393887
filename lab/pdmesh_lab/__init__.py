"""The laboratory: a simulator of meshes, studies of policies, and commands for both. See ``docs/simulator.md``."""
