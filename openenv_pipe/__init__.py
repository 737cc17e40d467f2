"""openenv-pipe: from one YAML file to a trained, evaluated agent on any OpenEnv environment."""

__version__ = "0.1.0"
