"""Scheduling policies: order, packing, placement, and the named bundles that set them all."""
