"""What `eval` can evaluate, that it measures all of it alike, and when training stops early."""

import shutil
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import run_samples
from fakes import FakeHost, play, rollout_context, run_config

from openenv_pipe.commands import evaluate as evaluating
from openenv_pipe.commands.evaluate import (
    changed_code,
    changed_settings,
    objection_to,
    on_the_same_tasks,
)
from openenv_pipe.config.compose import amend, compose
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.errors import ConfigError, RunFolderError, StepRejectedError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.pipeline.evaluate import play_baselines, stop_reason
from openenv_pipe.pipeline.facts import facts_before
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.reports.report import write_report
from openenv_pipe.runs.checkpoints import StageStep, new_checkpoint
from openenv_pipe.runs.evals import save_evaluation
from openenv_pipe.runs.find import PLAYED, find_model
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.progress import EpisodeCount


@pytest.fixture
def folder(tmp_path):
    """A run with checkpoints after 10 and 20 steps, of which the first is the best."""
    made = run_samples.create(tmp_path)
    for step in (10, 20):
        with new_checkpoint(made.path, StageStep("grpo", step)) as path:
            (path / "weights").write_text(str(step))
    (made.path / "checkpoints" / "best").symlink_to("step_000010")
    return made


@pytest.mark.parametrize(
    ("at", "label", "step"),
    [
        ("", "step_000020", 20),
        ("@10", "step_000010", 10),
        ("@best", "step_000010", 10),
        ("@start", "untrained", 0),
    ],
)
def test_a_word_names_a_run_and_a_checkpoint(folder, at, label, step):
    subject = find_model(f"{folder.path}{at}", ["eval.num_tasks=3"])
    assert (subject.label, subject.step) == (label, step)
    assert (subject.checkpoint is None) == (at == "@start")
    assert subject.config.eval.num_tasks == 3


def test_a_gate_is_told_that_a_model_is_not_that_of_the_end(folder):
    """Whoever names a checkpoint gets what was asked for."""
    word = str(folder.path)
    folder.finish("interrupted", cause="interrupted")
    assert objection_to(find_model(word, []), word) == f"{word} is interrupted, not finished"
    assert objection_to(find_model(f"{word}@10", []), f"{word}@10") is None
    folder.finish("finished")
    assert objection_to(find_model(word, []), word) is None
    (folder.path / "checkpoints" / "step_000020" / "weights").write_text("cut")
    assert objection_to(find_model(word, []), word) == f"step_000020 of {word} is damaged"


def test_the_start_of_a_fork_is_the_checkpoint_that_it_began_with(folder, tmp_path):
    """Weights before all training would credit the fork with what its origin had learned."""
    lineage = folder.lineage("fork", "step_000010")
    fork = run_samples.create(tmp_path, lineage=lineage)
    with new_checkpoint(fork.path, StageStep("grpo", 10)) as path:
        (path / "weights").write_text("10")
    subject = find_model(f"{fork.path}@start", [])
    assert (subject.label, subject.step) == ("step_000010", 10)
    assert subject.checkpoint == fork.path / "checkpoints" / "step_000010"
    shutil.rmtree(subject.checkpoint)
    with pytest.raises(RunFolderError, match="has no checkpoint"):
        find_model(f"{fork.path}@start", [])


def test_another_agent_than_the_runs_own_is_in_the_label(folder):
    """Its report is a row beside that of the pipeline's loop."""
    program = ["agent=program", "agent.command=[my-agent]"]
    assert find_model(f"{folder.path}@10", program).label == "step_000010_program"
    hosted = [*program, "engine=openai", "engine.model=m", "engine.api_key=null"]
    assert find_model(str(folder.path), hosted).label == "openai_program"


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(folder):
    with pytest.raises(RunFolderError, match="'7'; there are: start, 10, 20, best"):
        find_model(f"{folder.path}@7", [])
    (folder.path / "checkpoints").rename(folder.path / "elsewhere")
    with pytest.raises(RunFolderError, match="has no checkpoint: "):
        find_model(str(folder.path), [])


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_and_rejected_by_name(folder, caplog):
    (folder.path / "checkpoints/step_000020/weights").write_text("else")
    assert find_model(str(folder.path), []).label == "step_000010"
    assert "step_000020 is damaged" in caplog.text
    with pytest.raises(RunFolderError, match="step_000020 is damaged"):
        find_model(f"{folder.path}@20", [])


def test_a_scripted_player_needs_no_checkpoint(tmp_path):
    made = run_samples.create(tmp_path)
    overrides = ["engine=scripted", "engine.policy=wordle.policies:consistent"]
    subject = find_model(str(made.path), overrides)
    assert (subject.checkpoint, subject.label, subject.step) == (None, "scripted", None)


def test_the_first_run_is_the_yardstick_for_all(folder):
    first = find_model(f"{folder.path}@10", ["eval.num_tasks=5", "env.max_turns=4"])
    changes = ["env.tasks.eval.seed_start=7", "env.success_reward=2.0", "reward=env"]
    changes += ["env.variables.SCORE=other"]
    other = find_model(str(folder.path), changes)
    _, measured = on_the_same_tasks([first, other])
    assert measured.config.eval == first.config.eval
    assert measured.config.reward == first.config.reward
    assert measured.config.env.tasks.eval == first.config.env.tasks.eval
    assert measured.config.env.success_reward == first.config.env.success_reward
    assert measured.config.env.variables == first.config.env.variables
    assert measured.config.env.max_turns == other.config.env.max_turns == 6  # its own limits
    assert (measured.checkpoint, measured.label) == (other.checkpoint, other.label)


def test_a_secret_is_no_other_setting_than_the_runs_own(tmp_path):
    secret = "abcdef-0123456789-abcdef"
    words = ["conf=smoke", f"runs_dir={tmp_path}", f"env.variables.API_TOKEN={secret}"]
    made = run_samples.create(tmp_path, compose(words).config)
    used = compose([*words, "env.success_reward=2.0"]).config
    assert secret not in made.written_config.model_dump_json()
    assert changed_settings(made.written_config, used) == {"env.success_reward": "2.0, not 1.0"}


def test_runs_with_shares_of_other_tasks_are_not_put_side_by_side(folder, tmp_path):
    def subject(rows):
        path = f"env.tasks.train.path={tmp_path / rows}"
        return find_model(str(folder.path), ["env=questions", "reward=env", path])

    _, measured = on_the_same_tasks([subject("one"), subject("one")])
    assert measured.config.env.tasks.eval.type == "share"
    message = (
        "a share of env.tasks.train: its env.tasks.train.path is '.*two', not '.*one'; give both "
    )
    with pytest.raises(ConfigError, match=message):
        on_the_same_tasks([subject("one"), subject("two")])


JUDGED = (
    "reward=ruler",
    "judge=openai",
    "judge.base_url=https://localhost/v1",
    "judge.model=m",
    "judge.api_key=null",
)


def test_another_judge_is_another_setting_where_the_reward_asks_it(tmp_path):
    words = ["conf=smoke", f"runs_dir={tmp_path}", *JUDGED]
    own = run_samples.create(tmp_path, compose(words).config).written_config
    other = ["judge.model=other", "judge.max_concurrent=3"]
    found = changed_settings(own, compose([*words, *other]).config)
    assert found == {"judge.model": '"other", not "m"'}
    report = run_samples.evaluation(
        run_samples.create(tmp_path), "trained", run_samples.eval_episodes(), 1
    ).report.model_copy(update={"measured_with": found})
    assert report.other_scoring == found
    unasked = changed_settings(own, compose([*words, *other, "reward=env"]).config)
    assert not any(key.startswith("judge.") for key in unasked)


def test_the_first_runs_judge_judges_all(folder):
    """Another run may have another judge, or none."""
    first = find_model(str(folder.path), JUDGED)
    for words in ([], [*JUDGED, "judge.model=other"]):
        _, measured = on_the_same_tasks([first, find_model(str(folder.path), words)])
        assert measured.config.judge == first.config.judge


def test_how_much_is_evaluated_is_no_other_setting(tmp_path):
    words = ["conf=smoke", "beside.echo.conf=echo", f"runs_dir={tmp_path}"]
    made = run_samples.create(tmp_path, compose(words).config)
    changes = ("eval.num_tasks=3", "beside.echo.eval.num_tasks=3", "beside.echo.env.max_turns=3")
    used = compose([*words, *changes]).config
    assert [*changed_settings(made.written_config, used)] == ["beside.echo.env.max_turns"]


def test_code_that_has_changed_since_the_training_is_named(tmp_path):
    config = compose(["conf=wordle", "reward=env"]).config
    recorded = facts_before(config)
    assert changed_code(recorded, config) == {}
    files = recorded["env_files"]
    name = next(iter(files))
    changed = {**recorded, "env_files": {**files, name: "0" * 64}}
    (found,) = changed_code(changed, config).items()
    assert found == (f"env_files.{name}", f"{files[name][:12]}, not {'0' * 12}")
    other = compose(["conf=wordle"]).config
    assert changed_code(recorded, other) == {}, "functions of another reward are settings"
    assert changed_code({}, config) == {}


@pytest.mark.parametrize(
    ("words", "overrides", "is_asked"),
    [
        (
            ["agent=client", "host=none", "agent.token=KEY", "trainer.warm_start.steps=0"],
            ["agent=loop", "host=process"],
            False,
        ),
        (["engine=openai", "engine.model=m", "engine.api_key=KEY"], ["engine=local"], False),
        (
            ["judge=openai", "judge.model=m", "judge.api_key=KEY", "reward=ruler"],
            ["reward=env"],
            False,
        ),
        (["tracker=otlp", "+tracker.otlp.headers.api_key=KEY"], [], False),
        (["env.variables.API_TOKEN=KEY"], ["eval.num_tasks=1"], True),
        (["env.variables.API_TOKEN=KEY"], ["env.variables.API_TOKEN=another"], False),
    ],
)
def test_only_secrets_that_are_used_are_asked_for(tmp_path, words, overrides, is_asked):
    words = [word.replace("KEY", "abcdef-0123456789-abcdef") for word in words]
    changed = amend(run_samples.config(tmp_path), words)
    made = run_samples.create(tmp_path, changed)
    with new_checkpoint(made.path, StageStep("grpo", 1)) as path:
        (path / "weights").write_text("1")
    word = f"{made.path}@1"
    if is_asked:
        with pytest.raises(RunFolderError, match="set the environment variable API_TOKEN"):
            find_model(word, overrides, secrets_of=PLAYED)
    else:
        assert find_model(word, overrides, secrets_of=PLAYED).step == 1
    with pytest.raises(RunFolderError, match="set the environment variable"):
        made.config_to_run()


def evaluated_starts(tmp_path, monkeypatch, *words: str, seeds=(3,)):
    """Evaluate runs of these seeds before their training, in a fake environment."""

    @asynccontextmanager
    async def assembled(config, *_, **__):
        parts = {"chat": ChatFormat(build_tokenizer()), "engine": ScriptedEngine(one_letter)}
        yield SimpleNamespace(rollout=rollout_context(config, FakeHost(), **parts))

    monkeypatch.setattr(evaluating, "assembled", assembled)
    monkeypatch.setattr(evaluating, "check_evaluation", lambda config, **_: None)
    small = ["eval.baselines=false", "eval.num_tasks=2", "reward=env"]
    config = amend(run_samples.config(tmp_path), small)
    made = [
        run_samples.create(tmp_path, config.model_copy(update={"seed": seed})) for seed in seeds
    ]
    starts = [f"{each.path}@start" for each in made]
    return evaluating.evaluate([*starts, *words], [], RunControl(), trust=True).own


def test_runs_of_different_seeds_are_sampled_with_those_of_the_first(tmp_path, monkeypatch):
    first, other = evaluated_starts(tmp_path, monkeypatch, seeds=(3, 4))
    assert first.folder != other.folder
    seeds = [[task.seeds for task in row.report.tasks] for row in (first, other)]
    assert seeds[0] == seeds[1] and all(seeds[0])


def test_intervals_of_another_level_than_the_runs_own_are_named(tmp_path, monkeypatch):
    (own,) = evaluated_starts(tmp_path, monkeypatch)
    assert own.report.confidence is None
    (other,) = evaluated_starts(tmp_path, monkeypatch, "eval.confidence=0.8")
    assert other.report.confidence == 0.8
    text = write_report(RunFolder.open(other.folder)).read_text()
    assert "with 95% intervals (80% for untrained)" in text
    assert "[80% interval]" in (other.folder / "eval/untrained.md").read_text()


def test_runs_of_two_environments_are_not_put_side_by_side(folder):
    first = find_model(str(folder.path), [])
    other = find_model(str(folder.path), ["env=echo", "eval.num_tasks=4", "reward=env"])
    with pytest.raises(ConfigError, match="is 'echo', not 'wordle'"):
        on_the_same_tasks([first, other])


def test_what_only_training_chooses_by_does_not_keep_runs_from_being_compared(folder):
    """`eval` chooses no best checkpoint, so that nothing has to be evaluated during training."""
    first = find_model(str(folder.path), [])
    words = ["eval.during.every=1", "trainer.checkpoint.best.metric=eval/success"]
    _, measured = on_the_same_tasks([first, find_model(str(folder.path), words)])
    assert measured.config.eval == first.config.eval


def test_a_run_that_does_not_fit_the_first_ones_reward_is_named_with_it(folder, tmp_path):
    words = ["reward=[env,overlong]", "reward.terms.overlong.limit_tokens=400"]
    first = find_model(str(folder.path), [*words, "env.max_episode_tokens=400"])
    shorter = run_samples.create(tmp_path / "shorter")
    other = find_model(f"{shorter.path}@start", [])
    with pytest.raises(ConfigError) as raised:
        on_the_same_tasks([first, other])
    expected = f"{shorter.path} cannot be measured as {folder.path} is"
    assert expected in str(raised.value) and "env.max_episode_tokens=80" in str(raised.value)


def test_training_stops_when_the_target_is_reached(folder):
    run_samples.evaluate(folder, "during_000010", 0.8, step=10)
    report = run_samples.evaluation(
        folder,
        "during_000010",
        [run_samples.episode(run_samples.Random(0), i, 0, success=i < 8) for i in range(10)],
        10,
    ).report
    assert report.success.low < 0.75 < report.success.mean == 0.8

    def reason(*overrides):
        return stop_reason(
            amend(folder.config_to_run(), ["eval.during.every=5", *overrides]), report
        )

    assert reason() is None
    assert reason("eval.during.stop.at=0.75") is None  # the lower end of the interval is below 0.75
    text = reason("eval.during.stop.at=0.75", "eval.during.stop.bound=mean")
    assert "after step 10" in text and "success was 0.800" in text and "stop.at=0.75" in text
    assert reason("eval.during.stop.at=0.81", "eval.during.stop.bound=mean") is None
    assert "reward was" in reason("eval.during.stop.at=0.2", "eval.during.stop.measure=reward")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("eval.during.stop.measure=loss", "expected one of success, reward"),
        ("env.baselines.mine=nothing", "env.baselines.mine=.*such as wordle.rewards:name"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(override, expected):
    with pytest.raises(ConfigError, match=expected):
        compose(["conf=smoke", override])


def no_player(observations, draw):
    raise ValueError("no idea")


def one_letter(observations, draw):
    return "a"


async def test_a_baseline_that_fails_is_a_row_and_ends_nothing(folder):
    """Neither a player that raises nor one whose every action raises on the server ends a run."""

    def fragile(seed, number, action):
        if number:
            raise StepRejectedError("EXECUTION_ERROR", "7 is not a valid Action")
        return play(seed, number, action)

    players = {"broken": f"{__name__}:no_player", "random": f"{__name__}:one_letter"}
    config = run_config({"env.baselines": players, "eval.baselines": True, "eval.num_tasks": 2})
    chat, engine = ChatFormat(build_tokenizer()), ScriptedEngine(one_letter)
    rollout = rollout_context(config, FakeHost(fragile), chat=chat, engine=engine)
    count = EpisodeCount()
    broken, rejected = await play_baselines(config, rollout, count)
    assert count.total == 2 * 2 * config.eval.samples_per_task
    assert count.finished == 2 * config.eval.samples_per_task  # of the one that could be played
    assert "the baseline 'broken'" in broken.report.error and "no idea" in broken.report.error
    for words in ("'random'", "not a valid Action", "env.step_exception=unusable"):
        assert words in rejected.report.error
    assert "eval.baselines=false" in rejected.report.error
    for evaluation in (broken, rejected):
        save_evaluation(folder.path, evaluation)
    assert write_report(folder).read_text().count("not played: it failed") == 2
    assert "no idea" in (folder.path / "eval/baseline_broken.md").read_text()
