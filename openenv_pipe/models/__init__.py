"""The language model: chat template, policy, attention, log-probabilities, loading, memory."""
