"""Environment variables on a node."""

import os
from pathlib import Path

from openenv_pipe.config.compose import compose
from openenv_pipe.extras.cluster.worker import RolloutWorker
from openenv_pipe.system.child_environment import given_variables, inherited_variables
from openenv_pipe.system.secrets import redact


def test_a_node_gets_the_values_that_the_run_s_process_has(monkeypatch, tmp_path):
    """A node's own environment lacks them, and a configuration has their names alone."""
    monkeypatch.setenv("PLAIN_NAME", "of-the-run-s-machine")
    config = compose(["conf=echo", "env.variables={PLAIN_NAME: null, MOOD: merry}"]).config
    sent = inherited_variables(config.env.variables)
    assert sent == {"PLAIN_NAME": "of-the-run-s-machine"}
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    RolloutWorker(config, 0, Path.cwd(), tmp_path, sent)
    given = given_variables(config.env.variables, "env.variables")
    assert given == {"PLAIN_NAME": "of-the-run-s-machine", "MOOD": "merry"}
    assert redact("of-the-run-s-machine") == "<hidden: PLAIN_NAME>"
