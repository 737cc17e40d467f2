"""Episodes that are played by programs: their processes, their output, how they end."""
