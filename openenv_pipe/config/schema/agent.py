"""`agent`: what plays the episodes: the pipeline's own loop, or a program that calls the model."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from openenv_pipe.config.schema.base import (
    Block,
    HeaderValue,
    NumTurns,
    Port,
    PositiveCount,
    Seconds,
    Text,
    Variables,
)
from openenv_pipe.config.schema.registered import Registered
from openenv_pipe.system.http import LOOPBACK

ExitCode = Annotated[int, Field(ge=0, le=128)]  # codes above it are signals


class AgentBlock(Block):
    """Base of the agents."""

    type: str
    is_loop: ClassVar[bool] = False  # the pipeline's own loop plays
    # Whether it plays when the run wants an episode; False: it comes when it likes, or never.
    plays_on_demand: ClassVar[bool] = True

    @property
    def needs_environment(self) -> bool:
        """Whether the reward comes from steps in an environment."""
        return True

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it without a token of the user's own."""
        return False


class LoopAgentConfig(AgentBlock):
    """The pipeline makes prompts of observations, and actions of replies (conf/agent/loop.yaml)."""

    type: Literal["loop"]
    is_loop: ClassVar[bool] = True


class CallingAgentConfig(AgentBlock):
    """Base of the agents that call the model by HTTP: the limits of an episode's calls."""

    max_calls: NumTurns = Field(
        description="calls of the model; every further one is answered with a final message"
    )
    max_tokens: PositiveCount | None = Field(
        description="tokens of all prompts and replies together, after which calls are answered "
        "with a final message; null: any number"
    )


class SandboxBlock(Block):
    """Base of the sandboxes."""

    type: str
    is_this_machine: ClassVar[bool] = False  # programs read its files and inherit our variables


class NoSandboxConfig(SandboxBlock):
    """Programs run as you, on this machine (conf/agent/sandbox/none.yaml)."""

    type: Literal["none"]
    is_this_machine: ClassVar[bool] = True


SandboxConfig = Annotated[SandboxBlock, Registered("agent.sandbox")]


class ProgramAgentConfig(CallingAgentConfig):
    """A program that calls the model by HTTP (conf/agent/program.yaml).

    In `command`, `variables` and `files`, these are filled in: {python} this Python, or the image's
    python3, {prompt} the task as text, {prompt_file} a file with it, {task_file} a JSON file with
    the task, {base_url} of the model and {model} its name; in `variables` and `files`, which others
    cannot see, also {api_key} of the model and {env_url} of the environment's session. With
    sandbox.type=none also {start_folder}, in which the run was started, and with reward_from=harbor
    {results}, the folder for Harbor's jobs.
    """

    type: Literal["program"]
    command: Annotated[list[str], Field(min_length=1)] = Field(
        description="the program and its arguments; a part that names an existing file becomes its "
        "absolute path, because the program runs in a folder of its own; with sandbox.type=docker, "
        "all paths are those in the container"
    )
    variables: Variables = Field(
        description="further environment variables of the program; null: the value that this "
        "process has"
    )
    files: dict[str, Text] = Field(
        description="files to write into the program's folder, by path in it, such as an agent's "
        "configuration"
    )
    timeout_s: Seconds = Field(
        description="how long the program may work, without the time that it waits for the model"
    )
    grace_s: Seconds = Field(
        description="how long a program that is stopped has to clean up between SIGTERM and SIGKILL"
    )
    max_output_mb: PositiveCount = Field(
        description="a program that writes more to stdout and stderr is stopped"
    )
    exit_codes: Annotated[list[ExitCode], Field(min_length=1)] = Field(
        description="exit codes after which the episode counts; a program that ends with another "
        "one has failed, and its episode has no reward"
    )
    reward_from: Literal["environment", "harbor"] = Field(
        description="environment: the rewards of the steps that the program takes; harbor: what "
        "the verifier of a Harbor task wrote, with {results} as the folder for Harbor's jobs; an "
        "episode without it has failed"
    )
    sandbox: SandboxConfig = Field(description="where the programs run")

    @property
    def needs_environment(self) -> bool:
        return self.reward_from == "environment"

    @model_validator(mode="after")
    def _results_can_be_read(self) -> "ProgramAgentConfig":
        if self.reward_from == "harbor" and not self.sandbox.is_this_machine:
            raise ValueError(
                f"reward_from=harbor with sandbox.type={self.sandbox.type}: Harbor starts the "
                "containers of its tasks itself; set agent/sandbox=none"
            )
        return self

    @model_validator(mode="after")
    def _command_has_no_key(self) -> "ProgramAgentConfig":
        for placeholder in ("{api_key}", "{env_url}"):
            if any(placeholder in part for part in self.command):
                raise ValueError(
                    f"agent.command contains {placeholder}, and with it the key of an episode, "
                    "which `ps` would show to all users of this machine; put it into "
                    "agent.variables or agent.files; the program finds the key in OPENAI_API_KEY "
                    "and the session in OPENENV_URL"
                )
        return self


class ClientAgentConfig(CallingAgentConfig):
    """Clients of `openenv_pipe.client`, which come by HTTP (conf/agent/client.yaml)."""

    type: Literal["client"]
    host: str = Field(
        description="the address to listen at; one that other machines reach needs your own token"
    )
    port: Port = Field(description="the port to listen at")
    token: HeaderValue | None = Field(
        description="what clients have to send as a bearer token; null: a random one, which is "
        "printed"
    )
    group_timeout_s: Seconds = Field(
        description="how long after a group's first episode was opened its others may take; those "
        "that are not done by then do not count"
    )
    plays_on_demand: ClassVar[bool] = False

    @property
    def needs_environment(self) -> bool:
        return False

    @property
    def is_open(self) -> bool:
        return self.host not in LOOPBACK and self.token is None


AgentConfig = Annotated[AgentBlock, Registered("agent")]
