"""`episodes` and `watch`: which episodes are shown, hostile ones too, and how a run is followed."""

import json

import pytest
import run_samples

from openenv_pipe.cli import main as cli
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.run_state import RunState
from openenv_pipe.runs.checkpoints import find_checkpoint
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.system.secrets import remember_secrets
from openenv_pipe.types import Group, Step
from tests.fakes import all_episodes, made_up_episode, made_up_turn

SIZE = 5_000_000
HOSTILE = "<script>alert(1)</script> \x1b[31m\x9b2J [bold red]x[/] ```\n# x \ud800\u202e "


@pytest.fixture
def run(tmp_path):
    """The folder of a run of three steps of GRPO."""
    folder = run_samples.create(tmp_path)
    run_samples.train(folder, num_steps=3)
    return folder


@pytest.fixture
def hostile(tmp_path):
    """A run whose only episode has texts that would act where they are shown."""
    folder = run_samples.create(tmp_path)
    step = Step(action={"text": HOSTILE}, observation={HOSTILE: HOSTILE, "big": "x" * SIZE})
    messages = [{"role": "user", "content": HOSTILE}]
    turn = made_up_turn([1], [2], reply=HOSTILE + "y" * SIZE, steps=[step], unusable=HOSTILE)
    turn.messages = messages
    episode = made_up_episode(1.0, turns=[turn])
    episode.first_observation = {"prompt": HOSTILE}
    episode.reward_terms = {HOSTILE: 1.0}
    episode.error = HOSTILE
    group = Group(id=HOSTILE, task=episode.task, episodes=[episode])
    write_episodes(episodes_path(folder.path, 1), [group])
    return folder


@pytest.fixture
def shown(capsys):
    """Return a function that runs a command in this process and returns what it prints."""

    def command(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        printed = capsys.readouterr()
        assert ended.value.code in (0, None), printed.err
        return printed.out

    return command


def rewards(text):
    return [json.loads(line)["reward"] for line in text.splitlines()]


def test_the_worst_and_the_best_of_a_step_are_shown(run, shown):
    all_of_it = rewards(shown("episodes", run.path, "--step", 2, "--format", "json"))
    assert len(all_of_it) == 6
    worst = rewards(shown("episodes", run.path, "--step", 2, "--worst", 2, "--format", "json"))
    assert worst == sorted(all_of_it)[:2]
    best = rewards(
        shown("episodes", "show", run.path, "--step", 2, "--best", 1, "--format", "json")
    )
    assert best == [max(all_of_it)]
    both = shown("episodes", run.path, "--worst", 1, "--best", 1, "--format", "json")
    assert len(both.splitlines()) == 2


def test_an_episode_without_a_reward_is_shown_with_none(tmp_path, shown):
    folder = run_samples.create(tmp_path)
    groups = run_samples.groups(num_groups=1, size=1)
    groups[0].episodes[0].unscored = "the judge is silent"
    write_episodes(episodes_path(folder.path, 1), groups)
    assert rewards(shown("episodes", folder.path, "--format", "json")) == [None]
    text = shown("episodes", folder.path)
    assert "success, no reward (" in text and "\nreward none: the judge is silent\n" in text


def test_episodes_are_filtered(run, shown, capsys):
    def found(*options):
        text = shown("episodes", run.path, "--format", "json", "--limit", 100, *options)
        return [json.loads(line) for line in text.splitlines()]

    assert len(found()) == 18
    assert {each["step"] for each in found("--step", 3)} == {3}
    assert {each["task"] for each in found("--task", "eval/1")} == {"eval/1"}
    assert all(each["success"] for each in found("--success"))
    assert all(each["reward"] >= 1.0 for each in found("--min-reward", 1.0))
    assert all(
        each["reward_terms"]["win"] == 0 for each in found("--term", "win", "--max-reward", 0)
    )
    assert len(found("--text", "slate")) == 18
    assert found("--text", "nowhere in it") == []
    with pytest.raises(SystemExit):
        cli.main(["episodes", str(run.path), "--task", "nothing"])
    said = capsys.readouterr().err
    assert "no such episodes (--task nothing); it has 18 of training" in said


def test_an_evaluation_is_shown_by_its_label(run, shown):
    run_samples.save(run, "trained", all_episodes(run_samples.groups()))
    text = shown("episodes", run.path, "--eval", "trained", "--format", "md", "--limit", 2)
    assert text.count("### eval/trained, group") == 2
    assert "llm crane" in text


def test_the_whole_of_an_episode_has_the_messages_uncut(hostile, shown):
    """Also then nothing in it acts on a terminal."""
    text = shown("episodes", hostile.path, "--full")
    assert "[user] <script>" in text and "[1 model] <script>" in text
    assert len(text) > SIZE
    assert not {"\x1b", "\x9b", "\u202e", "\ud800"} & set(text)


@pytest.mark.parametrize("form", ["text", "md", "json"])
def test_a_hostile_episode_stays_text(hostile, shown, form):
    remember_secrets({"a-very-secret-value": "MY_TOKEN"})
    text = shown("episodes", hostile.path, "--format", form)
    text.encode()  # no lone surrogate
    for sign in ("\x1b", "\x9b", "\u202e", "\ud800"):
        assert sign not in text
    assert "<script>" in text
    if form == "json":
        (line,) = text.splitlines()
        reply = json.loads(line)["turns"][0]["reply"]
        assert reply.startswith("<script>alert(1)</script> \x1b[31m")
        assert len(reply) > SIZE
    else:
        assert "\\u001b[31m" in text
        assert len(text) < 10_000
    if form == "md":
        title, _, block = text.partition("\n````text\n")
        assert "<script>" not in title
        assert block.count("\n````") == 1


def test_a_finished_run_is_followed_line_by_line_on_a_pipe(run, shown):
    run.finish("finished")
    lines = shown("watch", run.path).splitlines()
    assert lines[0].startswith("grpo 1/2 reward 0.0")
    assert [line.split()[1] for line in lines[:3]] == ["1/2", "2/2", "3/2"]
    assert lines[3:] == ["smoke/0001 finished"]


def test_new_steps_are_told_once_and_the_end_ends_it(tmp_path):
    folder = run_samples.create(tmp_path)
    state = RunState(folder.path)
    assert state.new_lines() == ["smoke/0001 running"]
    run_samples.append(folder, run_samples.record(1))
    (line,) = state.new_lines()
    assert line.startswith("grpo 1/2 reward")
    assert state.new_lines() == []
    assert not state.has_ended
    folder.finish("failed", cause="HostError: \x1b[31mgone")
    (line,) = state.new_lines()
    assert line == "smoke/0001 failed: HostError: \\u001b[31mgone"
    assert state.has_ended


def test_the_image_has_progress_numbers_curves_and_alarms(tmp_path):
    folder = run_samples.create(tmp_path)
    unusable = {"replies/unusable": 1.0}
    run_samples.append(folder, *(run_samples.record(step) | unusable for step in (1, 2)))
    lines = RunState(folder.path).image()
    assert lines[0] == "smoke/0001 running"
    assert lines[1].startswith("grpo 2/2 · left 0:00 · last step ")
    assert "success 0.05 · tokens/s 5210" in lines[2]
    assert any(line.startswith("reward/mean   ▁█  0.0247 .. ") for line in lines)
    assert any(line.startswith("! ") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["episodes", "RUN"], "such episodes (of training); it has those of the evaluations s"),
        (["episodes", "export", "RUN", "--format", "jsonl"], "those of the evaluations start"),
        (["export", "RUN"], "has no checkpoint: it has evaluations only, and trained nothing"),
        (["eval", "RUN@best"], "has no checkpoint: it has evaluations only, and trained nothing"),
        (["train", "--resume", "RUN"], "has evaluations only, so there is no training to contin"),
        (["train", "--fork", "RUN@2"], "has no checkpoint: it has evaluations only, and trained n"),
    ],
)
def test_a_run_of_evaluations_only_is_named_as_such(words, said, tmp_path, capsys):
    """As `eval conf=smoke` makes it, of a model that no run has trained."""
    folder = run_samples.create(tmp_path, purpose="evaluation")
    run_samples.evaluate(folder, "start", 0.5)
    folder.finish("finished")
    with pytest.raises(SystemExit) as ended:
        cli.main([word.replace("RUN", str(folder.path)) for word in words])
    assert ended.value.code == (0 if words == ["episodes", "RUN"] else 2)
    assert said in capsys.readouterr().err
    assert not list(folder.path.glob("exports/*"))


def test_a_run_without_a_checkpoint_says_why(tmp_path):
    folder = run_samples.create(tmp_path)
    with pytest.raises(RunFolderError, match="wait for its first one, or let Ctrl-C write one"):
        find_checkpoint(folder.path, "")
    folder.finish("failed", cause="an error")
    with pytest.raises(RunFolderError, match="has no checkpoint: it is failed, and saved none"):
        find_checkpoint(folder.path, "")
