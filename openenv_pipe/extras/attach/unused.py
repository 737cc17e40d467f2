"""Keys that have no effect with servers that others start."""

from openenv_pipe.config.unused_keys import IneffectiveKeys

RULES = (
    IneffectiveKeys(
        keys=("env.command", "env.python", "env.variables"),
        because=("host.type",),
        applies=lambda config: config.host.type == "attach",
        advice="the run starts no server; set it where the server is started",
    ),
)
