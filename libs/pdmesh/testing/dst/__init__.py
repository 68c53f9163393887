"""Deterministic simulation testing: the real services on one event loop of virtual time, with faults drawn from a seed.

See ``docs/testing/simulation.md``. `pdmesh.testing.dst.run.run` takes a `pdmesh.testing.dst.plan.Plan` and says which
laws broke.
"""
