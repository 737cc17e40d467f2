"""An environment with the faults that $FAULTS names, for `env check` to find."""
