"""Measurements of pdmesh. `README.md` beside this file says where each one is."""
