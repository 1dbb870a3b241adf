"""The way from a configuration to a session: the programs of a model over one store, opened on a device."""
