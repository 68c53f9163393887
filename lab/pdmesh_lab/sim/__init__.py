"""The simulator: the scheduling core on a virtual clock, with modelled instances and links. ``docs/simulator.md``."""
