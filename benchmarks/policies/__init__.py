"""Costs and gains of scheduling decisions."""
