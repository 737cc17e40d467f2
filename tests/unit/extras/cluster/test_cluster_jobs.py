"""The job files of docs/jobs: YAML, whose commands compose."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from openenv_pipe.config.compose import compose
from openenv_pipe.extras.cluster.schema import RayClusterConfig

JOBS = Path(__file__).parents[4] / "docs" / "jobs"
COMMANDS = {
    "kuberay": lambda job: job["spec"]["entrypoint"],
    "skypilot": lambda job: job["run"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_of_job_files_compose(name):
    job = yaml.safe_load((JOBS / f"{name}.yaml").read_text())
    command = COMMANDS[name](job).replace("\\\n", " ")
    (words,) = re.findall(r"openenv-pipe train (.+)", command)
    config = compose(shlex.split(words)).config
    assert isinstance(config.cluster, RayClusterConfig)


def test_every_job_file_is_tested():
    assert {path.stem for path in JOBS.iterdir()} == set(COMMANDS)
