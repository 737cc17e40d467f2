"""What a run requires of its agents. Unlike the agents' own modules, this is quick to import."""

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.programs.program import check_program
from openenv_pipe.extras.agents.schema import ClientAgentConfig, ProgramAgentConfig
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.http import LOOPBACK
from openenv_pipe.system.process import port_in_use


def check_programs(config: ProgramAgentConfig) -> str:
    """Describe in a line what would be started. Raises ConfigError if it cannot be."""
    if config.sandbox.is_this_machine:
        return check_program(config)
    return str(load(block_types("agent.sandbox")[config.sandbox.type].check)(config.sandbox))


def check_clients(config: ClientAgentConfig) -> str:
    """Return where clients connect. Raises ConfigError if the port is taken."""
    if config.host in LOOPBACK and port_in_use(config.port):
        raise ConfigError(
            f"agent.port={config.port}: the port is used by another program; set another one"
        )
    return f"clients at {config.host}:{config.port}"
