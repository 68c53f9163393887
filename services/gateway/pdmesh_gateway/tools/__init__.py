"""Formats in which models write calls of tools: for each model family a grammar and a reader."""
