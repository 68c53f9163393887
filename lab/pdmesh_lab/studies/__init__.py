"""Bundles of papers, with their orders and planners, for comparison."""
