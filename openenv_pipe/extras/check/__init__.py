"""`openenv-pipe check`: tries what a run needs, says what it found, and leaves nothing behind.

cli          the command's help
checks       all checks, in their order
environment  servers, sessions, seeds and tasks, and the first messages against their limits
rewards      the user's reward functions, called with an episode; an episode of each baseline
model        the model beyond what training requires
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="check", commands=(Command(name="check", target="openenv_pipe.extras.check.cli:check"),)
)
