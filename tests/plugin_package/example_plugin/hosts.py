"""A host of the environment's servers."""

from openenv_pipe.config.schema import ProcessHostConfig
from openenv_pipe.environments.hosts.process import ProcessHost, server_command


class NiceHost(ProcessHost):
    """One server process on this machine, with a low priority."""

    def __init__(self, env, logs, sessions_per_server, *, niceness):
        command = ["nice", "-n", str(niceness), *server_command(env)]
        config = ProcessHostConfig(
            type="process",
            num_servers=1,
            sessions_per_server=sessions_per_server,
            port=None,
            start_timeout_s=60.0,
            stop_timeout_s=10.0,
            max_restarts=2,
        )
        super().__init__(env.model_copy(update={"command": command}), config, logs)
