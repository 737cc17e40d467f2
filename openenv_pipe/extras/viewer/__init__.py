"""`openenv-pipe view`, `compare`, `episodes` and `watch`: what runs have recorded.

cli              options and help of `view` and `compare`
cli_episodes     those of `episodes` and `watch`
view             what `view` serves or writes
web/             the pages, and what they ask for
play_checkpoint  episodes that a person and a checkpoint play in the viewer
score_tokens     what a checkpoint says of an episode's tokens
compare/         runs side by side
episodes/        the index of recorded episodes, what is asked of it, and formats of export
run_state        the lines of `watch`
"""

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
