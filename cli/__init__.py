"""The ``pagerelay`` command: one service, a whole local cluster, keys, models."""
