"""Where environment servers run: `base` is the contract, the other files keep it."""
