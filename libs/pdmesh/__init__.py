"""pdmesh: a disaggregated serving mesh for large language models.

Layers, each importing only from those before it:

* pure core: ``model``, ``errors``, ``metrics``, ``core``, ``policy`` (no I/O, no clock, no torch);
* edges: ``config``, ``wire``, ``transport``, ``kv``, ``engine``, ``worker``, ``telemetry``, ``cli``;
* ``testing``: fakes and generators that are part of the product, used by tests and benchmarks.
"""

__version__ = "0.1.0"
