"""The viewer's answers about several runs: overlays, sweeps and evaluations."""

import pytest
import run_samples
from starlette.testclient import TestClient

from openenv_pipe.extras.viewer.web import server
from openenv_pipe.extras.viewer.web.comparisons import show_evaluations
from openenv_pipe.extras.viewer.web.run_store import RunStore


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    """Two runs with different learning rates, which a sweep with a lost job has made."""
    runs_dir = tmp_path_factory.mktemp("runs")
    run_samples.sweep(runs_dir, {0.1: 0.4, 0.2: 0.8})
    (runs_dir / "sweeps" / "broken").mkdir()
    (runs_dir / "sweeps" / "broken" / "sweep.json").write_text("[")
    return runs_dir


@pytest.fixture(scope="module")
def client(runs_dir):
    return TestClient(server.build_app(RunStore(runs_dir)), base_url="http://127.0.0.1")


def test_settings_in_which_runs_differ(client):
    found = client.get("/api/compare", params={"runs": "smoke/0001,smoke/0002"}).json()
    assert found["keys"] == ["trainer.optimizer.lr"]
    best, other = found["settings"]
    assert best["name"] == found["best"] == "optimizer.lr=0.2"
    assert (best["runs"], other["runs"]) == (["smoke/0002"], ["smoke/0001"])
    assert best["figures"]["success"]["mean"] == pytest.approx(0.8)


@pytest.mark.parametrize("runs", ["", "smoke/0009", "../x", ",".join(f"a/{i}" for i in range(7))])
def test_runs_that_cannot_be_compared(client, runs):
    for what in ("compare", "evaluations"):
        answer = client.get(f"/api/{what}", params={"runs": runs})
        assert answer.status_code == 404
        assert answer.json()["error"]


def test_sweeps(client):
    first, second = client.get("/api/sweeps").json()["sweeps"]
    assert first["status"] == "unreadable" and "sweep.json" in first["problem"]
    assert second["stamp"] == "2026"
    assert second["jobs"] == {"failed": 1, "finished": 2}
    found = client.get("/api/sweeps/2026").json()
    assert [each["values"] for each in found["settings"]] == [
        {"trainer.optimizer.lr": 0.2},
        {"trainer.optimizer.lr": 0.1},
    ]
    assert found["lost_jobs"] == ["job 3 (a=3): failed, no"]


@pytest.mark.parametrize("stamp", ["%2e%2e", "nothing", "%2e", "a%2f%2e%2e"])
def test_sweeps_that_are_not_there(client, stamp):
    assert client.get(f"/api/sweeps/{stamp}").status_code == 404


def test_evaluations_by_task_with_paired_differences(client):
    found = client.get("/api/evaluations", params={"runs": "smoke/0002"}).json()
    assert [each["name"] for each in found["reports"]] == ["start", "trained"]
    assert (found["before"], found["after"]) == ("start", "trained")
    assert found["difference"]["success"]["mean"] == pytest.approx(0.6)
    assert found["difference"]["num_tasks"] == len(found["tasks"]) == 10
    successes = [each["scores"]["trained"]["success"] for each in found["tasks"]]
    assert sorted(successes) == [0.0] * 2 + [1.0] * 8


def test_evaluations_of_two_runs(client):
    query = {
        "runs": "smoke/0001,smoke/0002",
        "before": "smoke/0001 trained",
        "after": "smoke/0002 trained",
    }
    found = client.get("/api/evaluations", params=query).json()
    assert len(found["reports"]) == 4
    assert found["difference"]["success"]["mean"] == pytest.approx(0.4)
    nothing = client.get("/api/evaluations", params={**query, "after": "x"}).json()
    assert nothing["difference"] is None


@pytest.mark.parametrize("label", ["trained_greedy", "trained.echo", "untrained", "trained_7"])
def test_a_difference_without_a_choice_is_that_of_the_newest_stages(tmp_path, label):
    folder = run_samples.create(tmp_path)
    run_samples.train(folder)
    run_samples.evaluate(folder, "start", 0.2)
    run_samples.evaluate(folder, "trained", 0.4, step=2)
    run_samples.evaluate(folder, "trained", 0.8, step=2)
    run_samples.evaluate(folder, label, 0.5, step=0 if label == "untrained" else 2)
    found = show_evaluations(RunStore(tmp_path), {"runs": "smoke/0001"})
    assert (found["before"], found["after"]) == ("start", "trained_2")
    assert found["difference"]["success"]["mean"] == pytest.approx(0.6)


def test_a_difference_of_a_run_with_an_outdated_stage_is_that_of_all_evaluations(tmp_path):
    folder = run_samples.create(tmp_path)
    run_samples.train(folder, num_steps=4)
    run_samples.evaluate(folder, "start", 0.2)
    run_samples.evaluate(folder, "trained", 0.4, step=2)
    run_samples.evaluate(folder, "step_000004", 0.8, step=4)
    found = show_evaluations(RunStore(tmp_path), {"runs": "smoke/0001"})
    assert (found["before"], found["after"]) == ("start", "step_000004")
