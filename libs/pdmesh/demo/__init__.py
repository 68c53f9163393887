"""The model that serves when none is named."""
