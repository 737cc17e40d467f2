"""`judge check`, and `rescore` with a judge, on a recorded run; the judge is a scripted server."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openenv_pipe.cli import main as cli
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.extras.judges.check import find_recorded
from openenv_pipe.runs.episodes import episodes_path, read_episodes, write_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.types import Episode, Group, Task
from tests.judge_server import JudgeServer, said
from tests.judged_groups import episode

pytestmark = pytest.mark.slow


def played(task: Task, member: int, letters: list[str]) -> Episode:
    """An episode of echo at the letter b; each of `letters` is a reply."""
    made = replace(episode(member, *letters), task=task)
    for turn in made.turns:
        turn.steps = [replace(turn.steps[0], reward=float(turn.reply == "b"))]
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on the environment's reward, with episodes of four steps."""
    config = compose(["conf=echo", f"runs_dir={tmp_path_factory.mktemp('runs')}"]).config
    folder = RunFolder.create(config, overrides=[], command=[]).path
    source = random.Random(0)
    for step in range(5):
        groups = []
        for place in range(4):
            task = Task(id=f"train/{place}", split="train", index=place, seed=place)
            members = [played(task, n, source.choices("bcx", k=4)) for n in range(6)]
            groups.append(Group(id=f"step {step}/{place}", task=task, episodes=members))
        write_episodes(episodes_path(folder, step), groups)
    return folder


@pytest.fixture
def server():
    with JudgeServer(noise=0.02) as server:
        yield server


def judge(capsys, *arguments: str) -> tuple[int, Any]:
    """Check the judge; return its exit code and the JSON that it printed."""
    try:
        cli.main(["judge", "check", *arguments, "--format", "json"])
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, json.loads(capsys.readouterr().out)


def check(capsys, server: JudgeServer, run: Path, output: Path, *more: str) -> tuple[int, Any]:
    given = [str(run), "reward=ruler", *server.overrides, "--output", str(output), *more]
    code, report = judge(capsys, *given)
    return code, {line["name"]: line for line in report["lines"]}


def test_a_good_judge_passes_and_is_asked_once_for_each_order_and_repeat(
    server, run, tmp_path, capsys
):
    code, lines = check(capsys, server, run, tmp_path, "--groups", "6")
    assert code == 0
    assert {line["result"] for line in lines.values()} == {"ok"}
    agreement = lines["ruler: agreement"]["measured"]
    assert agreement["auc"] > 0.99
    assert agreement["auc_low"] <= agreement["auc"] <= agreement["auc_high"]
    assert agreement["rank_correlation"] > 0.9
    assert lines["ruler: repeats"]["measured"]["rank_correlation"] == 1.0
    assert lines["ruler: orders"]["measured"]["mean_difference"] == 0.0
    assert lines["ruler: position bias"]["measured"]["position_bias"] == pytest.approx(0.0)
    assert lines["ruler: cost"]["measured"]["num_calls_per_episode"] == pytest.approx(1 / 6)
    assert len(server.prompts) == 6 * 3  # two orders, and the first one again
    assert len(set(server.prompts)) == 6 * 2
    check(capsys, server, run, tmp_path, "--groups", "6")
    assert len(server.prompts) == 6 * 3  # all answers are kept


def test_the_runs_folder_stays_as_it_is(server, run, tmp_path, capsys):
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = contents()
    judge(capsys, str(run), "--groups", "2", "reward=ruler", *server.overrides)
    assert contents() == before
    assert (run.with_name(f"{run.name}_judged") / "verdicts").is_dir()


def first_is_best(prompt: str) -> Any:
    rows = JudgeServer().rows(prompt)
    for row in rows:
        row["score"] = (len(rows) - row["trajectory_id"]) / len(rows)
    return said(json.dumps({"scores": rows}))


def test_a_judge_that_follows_the_order_fails(server, run, tmp_path, capsys):
    server.judge = first_is_best
    code, lines = check(capsys, server, run, tmp_path, "--groups", "12")
    assert code == 1
    failed = {name for name, line in lines.items() if line["result"] == "fail"}
    assert {"ruler: agreement", "ruler: orders", "ruler: position bias"} <= failed
    assert lines["ruler: position bias"]["measured"]["position_bias_high"] < -0.5
    assert lines["ruler: repeats"]["result"] == "ok"


def test_a_judge_that_throws_dice_does_not_agree_with_itself(server, run, tmp_path, capsys):
    dice = random.Random(3)

    def throw(prompt: str) -> Any:
        rows = JudgeServer().rows(prompt)
        for row in rows:
            row["score"] = dice.random()
        return said(json.dumps({"scores": rows}))

    server.judge = throw
    code, lines = check(capsys, server, run, tmp_path, "--groups", "12")
    assert code == 1
    assert lines["ruler: repeats"]["result"] == "fail"
    assert lines["ruler: orders"]["result"] == "fail"


def test_a_judge_that_often_fails_is_reported_and_not_scored(server, run, tmp_path, capsys):
    server.judge = lambda _: (400, "too long", {})
    given = ["--groups", "2", "judge.max_retries=0"]
    code, lines = check(capsys, server, run, tmp_path, *given)
    assert code == 1
    assert list(lines) == ["failures"]
    assert lines["failures"]["measured"]["failed_share"] == 1.0
    assert "too long" in lines["failures"]["text"]
    server.judge = JudgeServer(noise=0.02).judge
    assert check(capsys, server, run, tmp_path, *given)[0] == 0  # failures are not kept


def test_limits_decide_the_exit_code_and_a_step_can_be_chosen(server, run, tmp_path, capsys):
    server.noise = 0.2
    given = ["--groups", "4", "--step", "3", "--repeats", "0", "--orders", "1"]
    code, lines = check(capsys, server, run, tmp_path, *given)
    assert code == 0
    assert len(server.prompts) == 4
    assert "ruler: repeats" not in lines
    assert check(capsys, server, run, tmp_path, *given, "--min-auc", "1")[0] == 1


def test_an_experiment_names_the_judge_and_its_newest_run(server, run, capsys):
    given = ["conf=echo", f"runs_dir={run.parents[1]}", "reward=ruler", *server.overrides]
    code, _ = judge(capsys, *given, "--step", "4", "--groups", "4")
    assert code == 0
    assert len(server.prompts) == 4 * 3


def test_the_newest_run_of_an_experiment_is_found_where_it_was_started(tmp_path, monkeypatch):
    """Its folder of runs was named by the run alone, not by the command that judges it."""
    monkeypatch.chdir(tmp_path)
    config = compose(["conf=echo", "runs_dir=elsewhere"]).config
    folder = RunFolder.create(config, overrides=[], command=[])
    words = ["conf=echo", "reward=ruler", "judge=openai", "judge.model=m", "judge.api_key=null"]
    found = find_recorded(words, None, trust=False)
    assert found.folder.path.resolve() == folder.path.resolve()
    config = compose(["conf=echo"]).config  # The default folder of runs has one now, too.
    folder = RunFolder.create(config, overrides=[], command=[])
    found = find_recorded(words, None, trust=False)
    assert found.folder.path.resolve() == folder.path.resolve()


def test_a_judge_of_single_episodes_is_checked_too(server, run, tmp_path, capsys):
    def by_rules(prompt: str) -> Any:
        (row,) = JudgeServer().rows(prompt.replace("<trajectory>", '<trajectory id="1">'))
        answer = {"explanation": "as seen", "score": row["score"]}
        return said(json.dumps({"right": answer}))

    criteria = "[{name: right, text: right letters, choices: [], weight: 1.0, gate: false}]"
    server.judge = by_rules
    given = [str(run), "reward=judge", f"reward.terms.judge.criteria={criteria}"]
    given += [*server.overrides, "--output", str(tmp_path), "--groups", "2"]
    code, report = judge(capsys, *given)
    lines = {line["name"]: line for line in report["lines"]}
    assert code == 0
    assert lines["judge: agreement"]["measured"]["auc"] == 1.0
    assert lines["judge: repeats"]["measured"]["mean_difference"] == 0.0
    assert lines["judge: cost"]["measured"]["num_calls_per_episode"] <= 1.0
    assert not {"judge: orders", "judge: position bias"} & set(lines)


def test_rescore_asks_the_judge_about_a_step(server, run, tmp_path, capsys):
    output = tmp_path / "again"
    given = [str(run), "reward=ruler", *server.overrides, "--output", str(output), "--step", "1"]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["rescore", *given])
    before, after = (read_episodes(episodes_path(folder, 1)) for folder in (run, output))
    assert [group.id for group in before] == [group.id for group in after]
    for group in after:
        for each in group.episodes:
            right = sum(turn.reward for turn in each.turns) / 4
            assert each.reward == pytest.approx(right, abs=0.021)
    assert len(server.prompts) == 4


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["RUN"], ConfigError, "there is no judge"),
        (["RUN", "judge=openai", "judge.model=m", "judge.api_key=null"], ConfigError, "asks a"),
        ([], ConfigError, "got 0 runs"),
        (["RUN", "RUN"], ConfigError, "got 2 runs"),
        (["RUN", "reward=ruler", "SERVER", "--step", "9"], RunFolderError, "steps 1 to 4"),
    ],
)
def test_what_cannot_be_judged_is_rejected(server, run, tmp_path, capsys, words, error, message):
    known = {"RUN": [str(run)], "SERVER": server.overrides}
    given = [each for word in words for each in known.get(word, [word])]
    with pytest.raises(SystemExit) as ended:
        cli.main(["judge", "check", "--output", str(tmp_path), *(given or ["seed=1"])])
    assert ended.value.code == error.exit_code
    assert message in capsys.readouterr().err
