"""Models in one or several GGUF files: reading, conversion into a checkpoint's directory, and dequantisation."""
