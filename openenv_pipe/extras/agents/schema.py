"""The keys of `agent=program`, `agent=client`, `agent/sandbox=none` and `host=none`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from openenv_pipe.config.schema.agent import AgentBlock, SandboxBlock, SandboxConfig
from openenv_pipe.config.schema.base import (
    HeaderValue,
    NumTurns,
    Port,
    PositiveCount,
    Seconds,
    Text,
    Variables,
)
from openenv_pipe.config.schema.host import HostBlock
from openenv_pipe.system.http import LOOPBACK

ExitCode = Annotated[int, Field(ge=0, le=128)]  # codes above it are signals


class CallingAgentConfig(AgentBlock):
    """Base of the agents that call the model over HTTP: the limits of an episode's calls."""

    max_calls: NumTurns = Field(
        description="calls of the model; every further one is answered with a final message"
    )
    max_tokens: PositiveCount | None = Field(
        description="tokens of all prompts and replies together, after which calls are answered "
        "with a final message; null: any number"
    )


class NoSandboxConfig(SandboxBlock):
    """Programs run as you, on this machine (conf/agent/sandbox/none.yaml)."""

    type: Literal["none"]
    is_this_machine: ClassVar[bool] = True


class ProgramAgentConfig(CallingAgentConfig):
    """A program that calls the model over HTTP (conf/agent/program.yaml).

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
        description="how long the program may work, not counting its waits for the model"
    )
    grace_s: Seconds = Field(
        description="time between SIGTERM and SIGKILL, in which a stopped program can clean up"
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
    """Clients of `openenv_pipe.client`, which connect over HTTP (conf/agent/client.yaml)."""

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
        description="time limit of a group, from the opening of its first episode; episodes that "
        "are not done by then do not count"
    )
    plays_on_demand: ClassVar[bool] = False

    @property
    def needs_environment(self) -> bool:
        return False

    @property
    def is_open(self) -> bool:
        return self.host not in LOOPBACK and self.token is None


class NoHostConfig(HostBlock):
    """No environment: clients and Harbor play by rules of their own (conf/host/none.yaml)."""

    type: Literal["none"]
    has_environment: ClassVar[bool] = False
