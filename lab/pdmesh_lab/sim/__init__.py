"""The simulator: the scheduling core on a virtual clock, over modelled instances and links. ``docs/simulator.md``."""
