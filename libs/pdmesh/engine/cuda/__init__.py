"""The engine on a CUDA device. Nothing here is imported where there is none."""
