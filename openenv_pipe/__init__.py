"""openenv-pipe: from one YAML file to a trained, evaluated agent on any OpenEnv environment."""

import logging

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())
