"""What we compare with: bundles of papers with their orders and planners."""
