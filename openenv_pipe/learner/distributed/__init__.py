"""Learning on several devices: worker processes, sharding, and communication between ranks."""
