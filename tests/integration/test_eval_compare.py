"""Real runs: evaluation during training, early stopping, `eval` of checkpoints, and `compare`."""

import json
from pathlib import Path
from xml.etree.ElementTree import parse

import pytest

from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.evals import read_during, read_reports
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics, without_times
from openenv_pipe.types import Status
from tests.commands import run

SMALL = ("num_threads=1", "device=cpu", "eval.num_tasks=3", "trainer.warm_start.steps=0")
SAMPLED = ("eval.temperature=1.0", "eval.samples_per_task=2")


def told(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run a command that must succeed and return what it prints."""
    ended, out, err = run(folder, *arguments)
    assert ended == code, err
    assert "Warning" not in err, err
    return out


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with two runs: one evaluates between its steps, one stops at a target."""
    folder = tmp_path_factory.mktemp("evaluated")
    during = ("eval.during.every=1", "eval.during.num_tasks=2")
    target = ("eval.during.stop.measure=reward", "eval.during.stop.at=-100.0")
    told(folder, "train", "conf=smoke", *SMALL, *SAMPLED, *during)
    told(folder, "train", "conf=smoke", *SMALL, *SAMPLED, *during, *target, "trainer.steps=5")
    return folder


def test_a_run_is_evaluated_on_its_way(home):
    path = home / "runs/smoke/0001"
    reports = read_during(path)
    # the evaluation after step 2 is the final one
    assert [report.step for report in reports] == [1]
    assert reports[0].num_tasks == 2 and reports[0].samples_per_task == 2
    assert set(read_reports(path)) == {"start", "trained", "baseline_expert", "baseline_random"}
    expert = read_reports(path)["baseline_expert"]
    assert expert.success.mean == 1.0 and expert.pass_at[2].mean == 1.0
    groups = read_episodes(path / "eval/baseline_expert.jsonl.gz")
    assert [len(group.episodes) for group in groups] == [2, 2, 2]
    text = (path / "report.md").read_text()
    assert "[baseline: expert](eval/baseline_expert.md)" in text and "pass@2" in text


def test_training_ends_when_its_target_is_reached_and_says_so(home):
    folder = RunFolder.open(home / "runs/smoke/0002")
    assert folder.status == "finished"
    assert folder.record.cause.startswith("stopped early: after step 1 the evaluation's reward")
    assert [record["step"] for record in read_metrics(folder.metrics_path)] == [1]
    assert read_reports(folder.path)["trained"].step == 1
    assert folder.checkpoints()[-1].name == "step_000001"
    assert "It stopped early" in (folder.path / "report.md").read_text()


def test_evaluations_on_the_way_leave_training_as_it_is(home, tmp_path):
    told(tmp_path, "train", "conf=smoke", *SMALL, *SAMPLED, "eval.baselines=false")
    texts = [
        [*map(without_times, (path / "runs/smoke/0001/metrics.jsonl").read_text().splitlines())]
        for path in (home, tmp_path)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 2


def test_checkpoints_of_two_runs_side_by_side(home):
    out = told(home, "eval", "runs/smoke/0001@start", "runs/smoke/0001", "runs/smoke/0002")
    lines = [line.split()[:3] for line in out.splitlines()]
    assert ["smoke/0001", "untrained", "tiny"] in lines
    assert ["smoke/0001", "step_000002", "tiny"] in lines
    assert ["smoke/0002", "step_000001", "tiny"] in lines
    assert "less smoke/0001 untrained" in out
    for number, label, stage in (
        ("0001", "untrained", "start"),
        ("0001", "step_000002", "trained"),
        ("0002", "step_000001", "trained"),
    ):  # the same weights, tasks and seeds give the same figures
        reports = read_reports(home / "runs/smoke" / number)
        assert reports[label].tasks == reports[stage].tasks


def test_an_evaluation_by_other_settings_than_the_runs_own_says_so(home):
    changed = "env.success_reward=0.5"
    ended, _, err = run(home, "eval", "runs/smoke/0001", changed, "eval.baselines=false")
    reports = read_reports(home / "runs/smoke/0001").values()
    (changes,) = [each.measured_with for each in reports if each.measured_with]
    assert changes == {"env.success_reward": "0.5, not 1.0"}
    assert (
        ended == 0
        and "settings or code than the run's own: env.success_reward is 0.5, not 1.0" in err
    )


def test_thresholds_are_also_written_as_junit(home):
    thresholds = ("--fail-under", "success=0", "--fail-under", "reward=1000")
    out = told(home, "eval", "runs/smoke/0001", *thresholds, "--junit", "eval.xml", code=3)
    last = out.splitlines()[-2:]
    assert last[0].startswith("OK smoke/0001 step_000002: success ") and last[0].endswith(" >= 0")
    assert last[1].startswith("FAIL smoke/0001 step_000002: reward ")
    assert last[1].endswith(" < 1000") and "baseline" not in out
    assert "](eval/step_000002.md)" in (home / "runs/smoke/0001/report.md").read_text()
    (suite,) = parse(home / "eval.xml").getroot()
    assert suite.attrib["name"] == "eval runs/smoke/0001"
    assert [(case.attrib["name"].split(": ")[1], case[0].tag) for case in suite] == [
        ("success", "system-out"),
        ("reward", "failure"),
    ]
    assert all(float(case.attrib["time"]) > 0 for case in suite)
    told(home, "eval", "runs/smoke/0001", "--junit", "other.xml", code=2)
    (failure,) = parse(home / "other.xml").findall(".//failure")
    assert "add --fail-under" in failure.text


# Asks the model once, and leaves the game as it is.
PROGRAM = """
import json, os, urllib.request
messages = json.load(open(os.environ["OPENENV_TASK_FILE"]))["messages"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": messages}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "text/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def test_a_program_plays_a_checkpoint_of_a_run_of_the_loop(home):
    """Its first reply to a task is that of the loop: the same prompt, weights and seed."""
    (home / "agent.py").write_text(PROGRAM)
    agent = ("agent=program", "agent.command=['{python}','-S','agent.py']")
    path = home / "runs/smoke/0001"
    out = told(home, "eval", "runs/smoke/0001", *agent, "eval.baselines=false")
    assert "step_000002_program" in out
    report = read_reports(path)["step_000002_program"]
    assert report.num_failed == 0
    (program, loop) = (
        [episode for group in read_episodes(path / "eval" / name) for episode in group.episodes]
        for name in ("step_000002_program.jsonl.gz", "trained.jsonl.gz")
    )
    assert len(program) == len(loop) == 6
    for ours, theirs in zip(program, loop, strict=True):
        assert (ours.status, len(ours.turns), ours.exit_code) == (Status.ANSWERED, 1, 0)
        assert ours.turns[0].prompt_ids == theirs.turns[0].prompt_ids
        assert ours.turns[0].completion_ids == theirs.turns[0].completion_ids
        assert ours.turns[0].logprobs == theirs.turns[0].logprobs
    missing = ("agent=program", "agent.command=[no-such-agent]")
    told(home, "eval", "runs/smoke/0001", *missing, code=2)


def test_the_two_runs_are_compared(home):
    out = told(home, "compare", "runs/smoke/0001", "runs/smoke/0002", "--format", "json")
    values = json.loads(out)
    stop = {"eval.during.stop.measure", "eval.during.stop.at", "trainer.steps"}
    assert set(values["keys"]) == stop
    assert len(values["settings"]) == 2 and values["best"] is not None
    told(home, "compare", "runs/smoke/0007", code=2)
