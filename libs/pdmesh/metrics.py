"""One definition of every figure the mesh reports. Filled in with the scheduling core."""
