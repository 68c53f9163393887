"""HTTP edge: OpenAI's API, and others beside it."""
