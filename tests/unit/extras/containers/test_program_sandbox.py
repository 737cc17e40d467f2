"""`agent/sandbox=docker` without a daemon: its settings, and what a container is started with."""

from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.containers.docker.guarded import GuardedDaemon
from openenv_pipe.extras.containers.docker.image import Image
from openenv_pipe.extras.containers.docker.sandbox import program_options, program_recipe
from openenv_pipe.pipeline.requirements import REQUIREMENTS
from openenv_pipe.runs.trust import CODE

PROGRAM = ("conf=echo", "agent=program", "agent.command=[agent]")
DOCKER = (*PROGRAM, "agent/sandbox=docker", "agent.sandbox.image=agent:1")


def configured(*given):
    return compose([*DOCKER, *given]).config


def test_a_container_gets_limits_and_its_files_to_read(tmp_path):
    sandbox = configured("agent.sandbox.mounts={/agent.py: agent.py}").agent.sandbox
    daemon = GuardedDaemon(tmp_path)
    daemon.image = Image("agent:1", "sha256:1", ("serve",), ())
    options = program_options(
        daemon,
        sandbox,
        command=["agent", "{}"],
        variables={"MOOD": "merry"},
        task_folder=tmp_path / "task",
        gateway_folder=tmp_path / "gateway",
    )
    assert options["network_mode"] == "none"
    assert options["mem_limit"] == options["memswap_limit"] == "1024m"
    assert (options["nano_cpus"], options["pids_limit"]) == (1_000_000_000, 256)
    assert options["log_config"]["Type"] == "none"  # a limited log can lose its reader
    assert options["cap_drop"] == ["ALL"] and options["read_only"]
    assert options["environment"] == {"MOOD": "merry"}  # and none of this process's
    mounts = {mount["Target"]: mount for mount in options["mounts"]}
    assert mounts["/agent.py"]["Source"] == str(Path("agent.py").absolute())
    assert len(mounts) == 3 and all(mount["ReadOnly"] for mount in mounts.values())
    words = options["entrypoint"] + options["command"]
    assert words[5:7] == ["8000", "/run/openenv-pipe/gateway/socket"]
    assert words[-2:] == ["agent", "{}"]
    assert options["labels"] != GuardedDaemon(tmp_path).labels  # each removes only its own


def test_the_image_is_pulled_by_its_name():
    recipe = program_recipe(configured().agent.sandbox)
    assert (recipe.arguments, recipe.block) == (("pull", "agent:1"), "agent.sandbox")


def test_what_cannot_be_mounted_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"'agent.py' is not an absolute path"):
        configured("agent.sandbox.mounts={agent.py: agent.py}")
    gone = configured(f"agent.sandbox.mounts={{/data: '{tmp_path}/gone'}}")
    with pytest.raises(ConfigError, match=r"gone' to mount at /data"):
        REQUIREMENTS["agent"](gone)
    here = configured(f"agent.sandbox.mounts={{/data: '{tmp_path}'}}")
    assert REQUIREMENTS["agent"](here) == "a program in containers of agent:1"


def test_an_untrusted_runs_program_and_image_are_shown_before_they_are_trusted():
    for key in ("command", "variables.HOOK", "files.a.json", "sandbox.image", "sandbox.mounts./a"):
        assert CODE.fullmatch(f"agent.{key}")
