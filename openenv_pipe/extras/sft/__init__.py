"""Supervised training on data: what the warm start imitates, and `openenv-pipe sft`."""

from openenv_pipe.registry import BlockType, Command, Extra

_FOLDER = "openenv_pipe.extras.sft"

EXTRA = Extra(
    name="sft",
    commands=(Command(name="sft", target=f"{_FOLDER}.cli:sft"),),
    blocks=(
        BlockType(
            block="trainer.warm_start.source",
            type="conversations",
            config=f"{_FOLDER}.schema:ConversationsConfig",
            build=f"{_FOLDER}.conversations:read_conversations",
            check=f"{_FOLDER}.rows:check_rows",
            trial=f"{_FOLDER}.conversations:try_conversations",
        ),
        BlockType(
            block="trainer.warm_start.source",
            type="episodes",
            config=f"{_FOLDER}.schema:EpisodesConfig",
            build=f"{_FOLDER}.episodes:read_recorded",
            check=f"{_FOLDER}.episodes:check_recorded",
        ),
        BlockType(
            block="trainer.warm_start.source",
            type="policy",
            config=f"{_FOLDER}.schema:PolicyConfig",
            build=f"{_FOLDER}.episodes:play_policy",
        ),
        BlockType(
            block="trainer.warm_start.source",
            type="teacher",
            config=f"{_FOLDER}.schema:TeacherConfig",
            build=f"{_FOLDER}.episodes:play_teacher",
        ),
    ),
)
