"""Episodes on other machines: rollout workers play them, and the engine of this process replies."""
