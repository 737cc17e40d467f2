"""Episodes that are played by clients, which connect when they like."""
