"""Several schedulers, one of them the leader. A lease in a store that all of them reach names the leader."""
