"""Several schedulers, of which one leads: a lease in a store that all of them reach says which."""
