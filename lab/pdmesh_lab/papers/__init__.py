"""Scenarios of the papers' evaluations, simulated: the rows of docs/results/papers.md."""
