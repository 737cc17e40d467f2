"""`openenv-pipe prune` removes what dead runs have left, and nothing of living ones."""

import pytest

from openenv_pipe.commands.prune import prune
from openenv_pipe.engines.vllm import weights_folder
from openenv_pipe.system.process_id import ProcessId

LIVING = ProcessId.of_this_process()
OWNERS = {
    "run-dead": LIVING.model_copy(update={"started_s": 0.0}),
    "run-living": LIVING,
    "run-elsewhere": LIVING.model_copy(update={"host": "another machine", "started_s": 0.0}),
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
    prune(dry_run=dry_run, namespace=None, context=None, tell=told.append)
    assert told.pop(0).startswith("containers are not looked for: no Docker daemon answers")
    return told


def test_weights_of_dead_runs_are_listed_then_removed(weights):
    dead = weights / "run-dead"
    assert pruned(dry_run=True) == [f"would be removed: weights in {dead}"]
    assert dead.exists()
    assert pruned(dry_run=False) == [f"removed: weights in {dead}"]
    assert sorted(path.name for path in weights.iterdir()) == ["run-elsewhere", "run-living"]
    assert pruned(dry_run=False) == ["dead runs have left nothing"]
