"""What the gateway understands: four dialects of calls, and who may send how much of them."""
