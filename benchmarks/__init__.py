"""Times structmax against its peers: ``python -m benchmarks --help``."""
