"""Every shipped configuration composes, is explained, and names existing things."""

from pathlib import Path

import pytest
import yaml

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.memory_estimate import tiny_shape
from openenv_pipe.rewards import Scorer
from openenv_pipe.system.resources import (
    find_env,
    group_names,
    group_options,
    load_callable,
    shipped_dir,
)

pytestmark = pytest.mark.slow

CONF = shipped_dir("conf")
FILES = sorted(path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml"))
# Keys that a choice leaves to the user.
REQUIRED = {
    "model=hub": ["model.path=somewhere"],
    "engine=scripted": ["engine.policy=wordle.policies:consistent"],
    "engine=openai": ["engine.model=some-model", "engine.api_key=null"],
    "tracker=python": ["tracker.python.target=my_tracker:Tracker"],
    "tracker=weave": ["tracker.weave.headers.project_id=team/project"],
    "engine=python": ["engine.target=openenv_pipe.engines.local:LocalEngine"],
    "host=python": ["host.target=my_host:Host"],
    "agent=harbor": ["host=none", "trainer.warm_start.steps=0"],
    "env=questions": ["conf=echo", "env.tasks.train.path=questions.jsonl"],
    "conf=harbor": ["env.tasks.train.path=train", "env.tasks.eval.path=eval"],
    "env=harbor": ["conf=harbor", "env.tasks.train.path=train", "env.tasks.eval.path=eval"],
    "agent=program": ["agent.command=['{python}', agent.py]"],
    "judge=openai": ["judge.model=some-model", "judge.api_key=null"],
    "reward=judge": ["judge=openai", "judge.model=some-model", "judge.api_key=null"],
    "judge=vllm": ["judge.model=some-model"],
    "reward=verifier": ["reward.terms.verifier.source.url=http://127.0.0.1:9000/verify"],
    "reward=ruler": ["judge=openai", "judge.model=some-model", "judge.api_key=null"],
    # The model tiny has positions for no more tokens.
    "conf=sft": ["trainer.warm_start.source.path=rows.jsonl", "env.max_episode_tokens=512"],
    "host=none": ["agent=client", "trainer.warm_start.steps=0"],
    "host=attach": ["host.urls=[http://127.0.0.1:8000]"],
    "host=kubernetes": ["host.image=registry.example/wordle:1"],
}
OPTIONS = [f"{group}={name}" for group in group_names() for name in group_options(group)]
# Experiments and trainers have tests of their own, and only `train -m` accepts sweeps.
OPTIONS = [each for each in OPTIONS if not each.startswith(("sweep=", "conf=", "trainer="))]


def test_groups_are_the_blocks_of_the_schema_and_the_experiments():
    assert set(group_names()) == {"conf", "env", "host", "reward", "model", "engine", "trainer"} | {
        "agent",
        "cluster",
        "judge",
        "eval",
        "tracker",
        "sweep",
    }
    assert set(group_names()) - {"conf", "sweep"} <= set(RunConfig.model_fields)


@pytest.mark.parametrize("experiment", group_options("conf"))
def test_an_experiment_names_existing_things(experiment):
    choice = f"conf={experiment}"
    config = compose([choice, *REQUIRED.get(choice, [])]).config
    assert config.name == experiment
    build_adapter(config.env.adapter)
    Scorer(config.reward, config.env.success_reward)
    if config.host.type != "none":
        assert (find_env(config.env.package) / "openenv.yaml").is_file()
    if policy := config.trainer.warm_start.source.scripted_policy:
        load_callable(policy)
    for policy in config.env.baselines.values():
        load_callable(policy)


@pytest.mark.parametrize("experiment", ["blackjack", "catch", "echo", "game2048", "reasoning"])
def test_examples_are_replies_that_the_adapter_can_use(experiment):
    adapter = compose([f"conf={experiment}", "model=smollm2_135m"]).config.env.adapter
    read = build_adapter(adapter).read
    assert [len(read(example.reply)) for example in adapter.examples] == [1] * len(adapter.examples)
    assert adapter.examples


@pytest.mark.parametrize(
    ("experiment", "sum_", "answer"),
    [("sums", " 2 - 12 =", "-10"), ("sums_tiers", " 4 - 8 + 9 - 3 =", "2")],
)
def test_sums_are_asked_with_one_example_whose_answer_is_right(experiment, sum_, answer):
    """Those of the environment have answers of another form, and more tokens than an episode."""
    adapter = compose([f"conf={experiment}"]).config.env.adapter
    (example,) = adapter.examples
    assert example.user.endswith(sum_)
    assert build_adapter(adapter).read(example.reply) == [{"answer": answer}]


@pytest.mark.parametrize("trainer", group_options("trainer"))
def test_a_trainer_means_the_same_in_every_experiment(trainer):
    """Experiments choose a trainer and do not change its algorithm; only an engine adds a
    correction."""
    choice = f"trainer={trainer}"
    plain = compose(["conf=echo", choice]).config.trainer
    assert plain.loss.correction.type == "none"
    for more in (["conf=wordle", "reward=[wordle,overlong]"], ["conf=catch", "engine=vllm"]):
        composed = compose([*more, choice]).config
        assert RunConfig.model_validate_json(composed.model_dump_json()) == composed
        config = composed.trainer
        correction = "truncate" if "engine=vllm" in more else "none"
        assert config.loss.correction.type == correction
        assert config.loss.model_copy(update={"correction": plain.loss.correction}) == plain.loss
        own = (config.advantage.baseline, config.advantage.scale)
        assert own == (plain.advantage.baseline, plain.advantage.scale)


def test_no_experiment_sets_what_makes_up_another_trainer():
    """Else a setting that is for the experiment's own trainer would change another in silence.

    Rounds above 1 are those of DAPO, and rejected with every other trainer.
    """
    trainers = {path.stem: path for path in (CONF / "trainer").glob("*.yaml")}
    files = [*trainers.values(), *(CONF / "trainer/loss").glob("*.yaml")]
    files.remove(trainers["grpo"])
    made_of = {
        f"loss.{key}" if path.parent.name == "loss" else key
        for path in files
        for key, _ in leaves(yaml.safe_load(path.read_text()))
    }
    assert {"loss.clip_high", "loss.normalise", "advantage.scale", "max_sampling_rounds"} <= made_of
    several_rounds = set()
    for path in (CONF / "conf").rglob("*.yaml"):
        own = dict(leaves((yaml.safe_load(path.read_text()) or {}).get("trainer") or {}))
        assert own.keys() & made_of <= {"max_sampling_rounds"}, path
        if own.get("max_sampling_rounds", "1") != "1":
            several_rounds.add(path.stem)
    assert several_rounds == {"sums"}
    for trainer in trainers.keys() - {"dapo"}:
        with pytest.raises(ConfigError, match=r"max_sampling_rounds=4 with trainer\."):
            compose(["conf=sums", f"trainer={trainer}"])
    assert compose(["conf=sums", "trainer=dapo"]).config.trainer.max_sampling_rounds == 4


@pytest.mark.parametrize("option", OPTIONS)
def test_every_choice_composes(option):
    given = [option, *REQUIRED.get(option, [])]
    conf = [] if any(part.startswith("conf=") for part in given) else ["conf=wordle"]
    config = compose([*conf, *given]).config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("path", FILES)
def test_no_file_repeats_what_it_builds_on(path):
    """A key that repeats an inherited value is redundant, and is wrong once the inherited value
    changes."""
    own = yaml.safe_load((CONF / path).read_text())
    for entry in own.get("defaults", []):
        parent = CONF / Path(path).parent / f"{entry}.yaml"
        if isinstance(entry, str) and parent.is_file():
            assert not set(leaves(own)) & set(leaves(yaml.safe_load(parent.read_text())))


def leaves(values: dict, prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in values.items():
        if key == "defaults":
            continue
        if isinstance(value, dict):
            found += leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", repr(value)))
    return found


@pytest.mark.parametrize("path", FILES)
def test_experiments_say_what_they_are_for_and_lines_are_short(path):
    lines = (CONF / path).read_text().splitlines()
    assert max(map(len, lines)) <= 120
    if path.startswith("conf/"):
        assert lines[0] == "# @package _global_"
        assert lines[1].startswith("# ")


def test_qwen3_conversations_only_grow():
    """Trap 3: Qwen3's template rewrites earlier turns; ours only appends and keeps thinking
    off."""
    jinja2 = pytest.importorskip("jinja2")
    source = compose(["conf=wordle", "model=qwen3_1_7b"]).config.model.chat_template
    template = jinja2.Environment().from_string(source)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    for reply in ("a", "<think>b</think>c"):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "u"}]
        grown = template.render(messages=messages, add_generation_prompt=True)
        assert grown.startswith(f"{text}{reply}<|im_end|>\n<|im_start|>user\n")
        text = grown


def test_the_estimate_of_the_tiny_model_is_exact():
    torch = pytest.importorskip("torch")
    from openenv_pipe.models.load import load_policy

    model = compose(["conf=wordle"]).config.model
    policy = load_policy(model, seed=0, device=torch.device("cpu"))
    assert tiny_shape(model).num_parameters == policy.num_parameters
