"""Deterministic simulation testing: the real services on one event loop of virtual time, with faults drawn from a seed.

See ``docs/testing/simulation.md``. `pdmesh_testing.dst.run.run` takes a `pdmesh_testing.dst.plan.Plan` and says which
laws broke.
"""
