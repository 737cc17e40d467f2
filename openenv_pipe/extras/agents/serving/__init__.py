"""`openenv-pipe serve`: a trained model by vLLM, or from this process."""
