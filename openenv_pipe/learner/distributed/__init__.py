"""Learning on several devices: the other ranks' processes, and what passes between ranks."""
