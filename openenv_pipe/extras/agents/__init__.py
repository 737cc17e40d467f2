"""Agents that call the model over HTTP: programs that a run starts, and clients that connect."""

from openenv_pipe.registry import BlockType, Command, Extra

EXTRA = Extra(
    name="agents",
    commands=(Command(name="serve", target="openenv_pipe.extras.agents.cli:serve"),),
    blocks=(
        BlockType(
            block="agent",
            type="program",
            config="openenv_pipe.extras.agents.schema:ProgramAgentConfig",
            build="openenv_pipe.extras.agents.programs.player:open_programs",
            check="openenv_pipe.extras.agents.checks:check_programs",
        ),
        BlockType(
            block="agent",
            type="client",
            config="openenv_pipe.extras.agents.schema:ClientAgentConfig",
            build="openenv_pipe.extras.agents.clients.player:open_clients",
            check="openenv_pipe.extras.agents.checks:check_clients",
        ),
        BlockType(
            block="agent.sandbox",
            type="none",
            config="openenv_pipe.extras.agents.schema:NoSandboxConfig",
            build="openenv_pipe.extras.agents.programs.this_machine:this_machine",
        ),
        BlockType(
            block="host",
            type="none",
            config="openenv_pipe.extras.agents.schema:NoHostConfig",
            build="openenv_pipe.extras.agents.no_host:NoHost",
        ),
    ),
)
