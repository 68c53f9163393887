"""Models in one GGUF file: read, made into a directory that looks like a checkpoint, and dequantised when loaded."""
