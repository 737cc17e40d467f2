"""Episodes that are played by clients, which come when they like."""
