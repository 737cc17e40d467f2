"""`openenv-pipe prune` removes what dead runs have left, and nothing of living ones."""

import os

import pytest

from openenv_pipe.engines.vllm import weights_folder
from openenv_pipe.extras.containers.prune import prune
from openenv_pipe.system.process_id import ProcessId

PREFIX = f"openenv-pipe-{os.getuid()}-"
LIVING = ProcessId.of_this_process()
OWNERS = {
    f"{PREFIX}dead": LIVING.model_copy(update={"pid": 2**22 + 1}),
    f"{PREFIX}living": LIVING,
    f"{PREFIX}in_a_container": LIVING.model_copy(update={"namespace": "pid:[1]", "pid": 2**22 + 1}),
    f"{PREFIX}elsewhere": LIVING.model_copy(update={"host": "another machine", "started_s": 0.0}),
}


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """The weights folders of three runs, and no Docker daemon."""
    monkeypatch.setattr(weights_folder, "IN_MEMORY", tmp_path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    parent = weights_folder.parent_folder(None)
    for name, owner in OWNERS.items():
        (parent / name).mkdir(parents=True)
        (parent / name / weights_folder.OWNER).write_text(owner.model_dump_json())
    return parent


def pruned(*, dry_run):
    told = []
    prune(dry_run=dry_run, namespace=None, context=None, notify=told.append)
    assert told.pop(0).startswith("containers are not looked for: no Docker daemon answers")
    return told


def test_weights_of_dead_runs_are_listed_then_removed(weights):
    dead = weights / f"{PREFIX}dead"
    assert pruned(dry_run=True) == [f"would be removed: weights in {dead}"]
    assert dead.exists()
    assert pruned(dry_run=False) == [f"removed: weights in {dead}"]
    left = sorted(path.name for path in weights.iterdir())
    assert left == [f"{PREFIX}elsewhere", f"{PREFIX}in_a_container", f"{PREFIX}living"]
    assert pruned(dry_run=False) == ["dead runs have left nothing"]
