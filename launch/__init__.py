"""The ott-shard command: flags, files and printing around :mod:`ott_shard`."""
