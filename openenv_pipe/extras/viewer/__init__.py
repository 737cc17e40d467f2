"""`openenv-pipe view`, `compare`, `episodes` and `watch`: what runs have recorded."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="viewer",
    commands=(
        Command(name="view", target="openenv_pipe.extras.viewer.cli:view"),
        Command(name="compare", target="openenv_pipe.extras.viewer.cli:compare"),
        Command(name="watch", target="openenv_pipe.extras.viewer.cli_episodes:watch"),
        Command(name="episodes", target="openenv_pipe.extras.viewer.cli_episodes:app"),
    ),
    functions=("openenv_pipe.extras.viewer.compare.api:compare",),
    on_episodes="openenv_pipe.extras.viewer.episodes.index:index_episodes",
)
