"""The requirements of `agent` that can be checked before servers are started."""

import sys
from pathlib import Path

from openenv_pipe.config.schema import (
    CallingAgentConfig,
    ClientAgentConfig,
    DockerSandboxConfig,
    RunConfig,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.rollout.agents.program import command_problem
from openenv_pipe.system.http import LOOPBACK
from openenv_pipe.system.process import port_in_use


def check_agent(config: RunConfig) -> str:
    """Check that the engine can answer the calls of `agent`, and that a program is there."""
    agent = config.agent
    if not isinstance(agent, CallingAgentConfig):
        return ""
    if config.engine.capabilities.takes != "token_ids" and config.engine.type != "openai":
        raise ConfigError(
            f"agent={agent.type} with engine={config.engine.type}, which answers no calls; set "
            "engine=local, engine=vllm, for evaluation engine=openai, or agent=loop"
        )
    if isinstance(agent, ClientAgentConfig):
        return _clients(config, agent)
    if isinstance(agent.sandbox, DockerSandboxConfig):
        return _sandbox(agent.sandbox)
    if (problem := command_problem(agent)) is not None:
        raise ConfigError(problem)
    return f"a program, {agent.command[0]}"


def _sandbox(sandbox: DockerSandboxConfig) -> str:
    if sys.platform != "linux":
        raise ConfigError(
            "agent.sandbox.type=docker: containers reach the model through a socket, which Docker "
            "shares on Linux only; set agent/sandbox=none"
        )
    for inside, path in sandbox.mounts.items():
        if not Path(path).expanduser().exists():
            raise ConfigError(
                f"agent.sandbox.mounts: there is no {path!r} to mount at {inside}; name a file or "
                "folder of this machine"
            )
    return f"a program in containers of {sandbox.image}"


def _clients(config: RunConfig, agent: ClientAgentConfig) -> str:
    if agent.host not in LOOPBACK and agent.token is None:
        raise ConfigError(
            f"agent.host={agent.host} lets other machines open episodes, and agent.token is null; "
            "set the environment variable OPENENV_PIPE_TOKEN, or agent.host=127.0.0.1"
        )
    if agent.host in LOOPBACK and port_in_use(agent.port):
        raise ConfigError(
            f"agent.port={agent.port}: the port is used by another program; set another one"
        )
    if config.eval.during.every:
        raise ConfigError(
            f"eval.during.every={config.eval.during.every} with agent=client: clients play no "
            "evaluations; set it to 0"
        )
    return f"clients at {agent.host}:{agent.port}"
