"""The server of the environment with faults."""
