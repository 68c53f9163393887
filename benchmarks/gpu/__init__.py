"""Measurements of a CUDA device; tests/gpu/recipe.sh runs them."""
