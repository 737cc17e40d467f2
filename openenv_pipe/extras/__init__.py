"""The extras: parts that the core does without, each in a folder that can be deleted."""
