"""Commands of the ``pdmesh`` command line that study a mesh."""
