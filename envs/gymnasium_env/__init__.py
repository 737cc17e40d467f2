"""Gymnasium for OpenEnv: environments with discrete or text actions, as text.

Nothing is imported here. Import what is needed directly: `gymnasium_env.client.GymnasiumEnv`,
`gymnasium_env.models`, `gymnasium_env.policies`, `gymnasium_env.server.app`.
"""
