"""`agent`: what plays the episodes: the pipeline's own loop, or a program that calls the model."""

from typing import Annotated, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import (
    Block,
    HeaderValue,
    Port,
    PositiveCount,
    Seconds,
    Text,
    VariableName,
)

ExitCode = Annotated[int, Field(ge=0, le=128)]  # codes above it are signals


class LoopAgentConfig(Block):
    """The pipeline makes prompts of observations, and actions of replies (conf/agent/loop.yaml)."""

    type: Literal["loop"]


class CallingAgentConfig(Block):
    """Base of the agents that call the model by HTTP: the limits of an episode's calls."""

    max_calls: PositiveCount = Field(
        description="calls of the model; every further one is answered with a final message"
    )
    max_tokens: PositiveCount | None = Field(
        description="tokens of all prompts and replies together, after which calls are answered "
        "with a final message; null: any number"
    )


class ProgramAgentConfig(CallingAgentConfig):
    """A program that calls the model by HTTP (conf/agent/program.yaml).

    In `command`, `variables` and `files`, these are filled in: {python} this Python, {prompt} the
    task as text, {prompt_file} a file with it, {task_file} a JSON file with the task, {base_url}
    and {api_key} of the model, {model} its name, {env_url} of the environment's session.
    """

    type: Literal["program"]
    command: Annotated[list[str], Field(min_length=1)] = Field(
        description="the program and its arguments; a part that names an existing file becomes its "
        "absolute path, because the program runs in a folder of its own"
    )
    variables: dict[VariableName, Text] = Field(
        description="further environment variables of the program"
    )
    files: dict[str, Text] = Field(
        description="files to write into the program's folder, by path in it, such as an agent's "
        "configuration"
    )
    timeout_s: Seconds = Field(
        description="how long the program may work, without the time that it waits for the model"
    )
    max_output_mb: PositiveCount = Field(
        description="a program that writes more to stdout and stderr is stopped"
    )
    exit_codes: Annotated[list[ExitCode], Field(min_length=1)] = Field(
        description="exit codes after which the episode counts; a program that ends with another "
        "one has failed, and its episode has no reward"
    )


class ClientAgentConfig(CallingAgentConfig):
    """Clients of `openenv_pipe.client`, which come by HTTP (conf/agent/client.yaml)."""

    type: Literal["client"]
    host: str = Field(
        description="the address to listen at; any but one of this machine alone needs a token"
    )
    port: Port = Field(description="the port to listen at")
    token: HeaderValue | None = Field(
        description="what clients have to send as a bearer token; null: none"
    )
    group_timeout_s: Seconds = Field(
        description="how long after a group's first episode was opened its others may take; those "
        "that are not done by then do not count"
    )


AgentConfig = Annotated[
    LoopAgentConfig | ProgramAgentConfig | ClientAgentConfig, Field(discriminator="type")
]
