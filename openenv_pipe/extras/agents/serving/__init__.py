"""`openenv-pipe serve`: a trained model, served by vLLM or by this process."""
