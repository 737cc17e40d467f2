"""The types of blocks that the core has, listed in the way in which an extra lists its own."""

from openenv_pipe.registry import BlockType, Extra

CORE = Extra(
    name="core",
    blocks=(
        BlockType(
            block="host",
            type="process",
            config="openenv_pipe.config.schema.host:ProcessHostConfig",
            build="openenv_pipe.environments.hosts.process:ProcessHost",
            check="openenv_pipe.environments.hosts.process:check_process_host",
        ),
        BlockType(
            block="host",
            type="attach",
            config="openenv_pipe.config.schema.host:AttachHostConfig",
            build="openenv_pipe.environments.hosts.attach:AttachHost",
        ),
        BlockType(
            block="host",
            type="python",
            config="openenv_pipe.config.schema.host:PythonHostConfig",
            build="openenv_pipe.environments.hosts.python:build_python_host",
            check="openenv_pipe.environments.hosts.python:check_python_host",
        ),
        BlockType(
            block="host",
            type="none",
            config="openenv_pipe.config.schema.host:NoHostConfig",
            build="openenv_pipe.environments.hosts.none:NoHost",
        ),
        BlockType(
            block="agent.sandbox",
            type="none",
            config="openenv_pipe.config.schema.agent:NoSandboxConfig",
            build="openenv_pipe.rollout.agents.sandbox:this_machine",
            check="openenv_pipe.rollout.agents.program:check_program",
        ),
        BlockType(
            block="tracker",
            type="python",
            config="openenv_pipe.config.schema.tracker:PythonTrackerConfig",
            build="openenv_pipe.trackers.python:build_python_tracker",
            check="openenv_pipe.trackers.python:check_python_tracker",
        ),
    ),
)
