"""How models write calls of tools: a format for each family, which is a grammar and a way to read it."""
