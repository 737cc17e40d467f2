"""Reasoning for OpenEnv: the questions and scorers of reasoning-gym, one question an episode.

Nothing is imported here, so that `reasoning.policies` can be used without loading the `openenv`
library, which takes seconds. Import the rest directly: `reasoning.client.ReasoningEnv`,
`reasoning.models`, `reasoning.tasks`, `reasoning.server.app`.
"""
