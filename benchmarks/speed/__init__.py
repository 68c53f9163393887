"""Times and rates of meshes and of the CPU engine."""
