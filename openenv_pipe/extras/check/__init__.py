"""`openenv-pipe check`: tries what a run needs, says what it found, and leaves nothing behind.

cli          the command's help
checks       all checks, in their order
environment  servers, sessions, seeds and tasks, and an episode of each baseline (baselines)
rewards      the user's reward functions, called with an episode
tokens       the first messages against the limits of an episode
model        the model beyond what training requires
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="check", commands=(Command(name="check", target="openenv_pipe.extras.check.cli:check"),)
)
