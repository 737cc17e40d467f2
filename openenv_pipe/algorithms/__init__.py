"""Group-relative policy optimisation as pure functions: no I/O, no configuration objects."""
