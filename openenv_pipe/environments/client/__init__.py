"""A connection to one environment server: the protocol, time limits, metadata."""
