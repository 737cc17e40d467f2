"""Trackers: send metrics and episodes to other tools, in addition to the run folder's own files."""
