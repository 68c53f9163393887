"""The core and the services without a mesh: seeds, planted bugs, digests of decisions."""
