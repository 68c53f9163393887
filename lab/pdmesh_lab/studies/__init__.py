"""What we compare with: bundles of papers with their orders and planners, and first tokens by a planner alone."""
