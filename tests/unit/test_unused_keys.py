"""Keys that somebody has set, and that the values of other keys leave without an effect."""

from functools import cache

import pytest

from openenv_pipe.config.compose import Composed, compose
from openenv_pipe.config.render import as_yaml
from openenv_pipe.config.unused_keys import all_rules, find_unused, unused_keys
from openenv_pipe.system.resources import group_options, shipped_dir

pytestmark = pytest.mark.slow

ECHO = "conf=echo"
FLAT = "reward.terms.env.per_turn=false"
ATTACHED = ("engine=vllm", "engine.launch=attach", "engine.url=http://127.0.0.1:1")
HOST = ("host=attach", "host.urls=[http://127.0.0.1:1]")
JUDGE = ("judge=openai", "judge.api_key=k", "judge.model=m")
RULER = ("reward=ruler", *JUDGE)
DOCKER = ("host=docker", "host.image=an/image:1")
RAY = "cluster=ray"

WARM = (
    "trainer.warm_start.steps=90",
    *("trainer.warm_start.source.policy=a:b", "trainer.warm_start.source.num_episodes=2"),
)

# What the message says of the cause, and overrides, the last of which sets the key without effect.
UNUSED = [
    (
        "schedule=constant",
        "trainer.optimizer.schedule=constant",
        "trainer.optimizer.final_lr_share=0.1",
    ),
    (
        "final_lr_share=1.0",
        "trainer.optimizer.final_lr_share=1.0",
        "trainer.optimizer.schedule=cosine",
    ),
    (
        "lr_warmup_steps=9 and trainer.steps=5",
        "trainer.optimizer.lr_warmup_steps=9",
        "trainer.steps=5",
        "trainer.optimizer.lr=1e-3",
    ),
    (
        "final_lr_share=1.0",
        *WARM,
        "trainer.warm_start.optimizer.final_lr_share=1.0",
        "trainer.warm_start.optimizer.schedule=linear",
    ),
    (
        "schedule=constant",
        *WARM,
        "trainer.warm_start.optimizer.schedule=constant",
        "trainer.warm_start.optimizer.final_lr_share=0.1",
    ),
    (
        "lr_warmup_steps=10",
        "trainer.warm_start.steps=9",
        *WARM[1:],
        "trainer.warm_start.optimizer.lr=1e-2",
    ),
    ("trainer.warm_start.steps=0", "trainer.warm_start.optimizer.lr=1e-2"),
    ("trainer.warm_start.steps=0", "trainer.warm_start.source.num_episodes=9"),
    ("trainer.loss.kl.coef=0.0", "trainer.loss.kl.estimator=k2"),
    (
        "trainer.loss.kl.estimator=exact",
        "trainer=distillation",
        "trainer.loss.kl.reference=a/teacher",
        "trainer.loss.kl.importance_weights=false",
    ),
    ("type=none", "trainer.loss.correction.high=3.0"),
    ("type=truncate", "trainer.loss.correction.type=truncate", "trainer.loss.correction.low=0.1"),
    ("trainer.updates_per_step=1", "trainer.loss.clip_high=0.28"),
    (
        "trainer.updates_per_step=1",
        "engine=vllm",
        "trainer.max_staleness=1",
        "trainer.loss.clip_low=0.1",
    ),
    ("per_turn=true", FLAT, "trainer.advantage.discount=0.5"),
    ("trainer.devices=1", "trainer.optimizer.type=adamw", "trainer.parallel=fsdp"),
    ("eval.during.every=0", "eval.during.num_tasks=3"),
    ("eval.during.stop.at=null", "eval.during.every=2", "eval.during.stop.bound=mean"),
    ("trainer.steps=5", "trainer.steps=5", "eval.during.every=5"),
    ("model.lora.rank=0", "model.lora.alpha=32.0"),
    ("host.type=attach", *HOST, "env.variables.A=1"),
    ("env.command says", "env.command=[server]", "env.python=/usr/bin/python3"),
    ("host.image=an/image:1", *DOCKER, "host.build_args.A=1"),
    ("eval.temperature=0", "eval.temperature=0", "engine.sampling.top_p=0.9"),
    ("engine.launch=managed", "engine=vllm", "engine.image=mine"),
    ("engine.launch=managed", "engine=vllm", "engine.url=http://127.0.0.1:1"),
    ("engine.launch=attach", *ATTACHED, "engine.gpu_memory_share=0.5"),
    ("no term of the reward asks a judge", *JUDGE),
    ("price_per_million_prompt_tokens=0.0", *RULER, "judge.max_cost=3.0"),
    ("judge.max_calls=null", *RULER, "judge.when_spent=continue"),
    ("cluster.learner_nodes=1", RAY, "cluster.cpus_per_rank=2.0"),
    ("vllm_on_nodes=False", RAY, "cluster.gpus_per_vllm_server=2"),
]


@cache
def composed(overrides: tuple[str, ...]) -> Composed:
    return compose([ECHO, *overrides])


@pytest.mark.parametrize("row", UNUSED, ids=lambda row: row[-1])
def test_a_key_without_an_effect_is_said(row):
    cause, *overrides = row
    key = overrides[-1].partition("=")[0]
    found = unused_keys(composed(tuple(overrides)))
    (text,) = (each for each in found if each.startswith(f"{key} "))
    assert cause in text


def test_keys_of_environments_beside_are_judged_by_their_own_blocks():
    beside = ("conf=smoke", "beside.echo.conf=echo")
    found = unused_keys(
        composed(
            (
                *(*beside, "beside.echo.reward.terms.env.per_turn=false"),
                "beside.echo.advantage.discount=0.9",
                "beside.echo.eval.during.num_tasks=2",
                "beside.echo.eval.during.every=1",
            )
        )
    )
    discount, num_tasks, every = found
    assert discount.startswith("beside.echo.advantage.discount has no effect: set per_turn=true")
    assert num_tasks.startswith(
        "beside.echo.eval.during.num_tasks has no effect with eval.during.every=0"
    )
    assert every.startswith("beside.echo.eval.during.every has no effect: it is evaluated when")
    often = (*beside, "eval.during.every=1", "beside.echo.eval.during.num_tasks=2")
    assert unused_keys(composed(often)) == []


def test_each_rule_is_tried():
    configs = [composed(tuple(overrides)).config for _, *overrides in UNUSED]
    applied = {rule.keys for each in configs for rule in all_rules() if rule.applies(each)}
    assert applied == {rule.keys for rule in all_rules()}


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.optimizer.schedule=linear",),
        ("trainer.updates_per_step=2", "trainer.loss.clip_high=0.28"),
        ("trainer.passes_per_step=2", "trainer.loss.clip_high=0.28"),
        ("trainer.max_staleness=1", "trainer.loss.clip_high=0.28"),
        ("trainer.loss.kl.coef=0.1", "trainer.loss.kl.estimator=k2"),
        ("trainer.loss.correction.type=mask", "trainer.loss.correction.low=0.1"),
        ("trainer.optimizer.lr=1e-3", "trainer.optimizer.lr_warmup_steps=4", "trainer.steps=5"),
        ("eval.during.every=4", "trainer.steps=5", "eval.during.num_tasks=3"),
        (
            *(*RULER, "reward.terms.env.per_turn=true", "judge.max_cost=3.0"),
            "judge.price_per_million_answer_tokens=1.0",
        ),
    ],
)
def test_a_key_with_an_effect_is_not(overrides):
    assert unused_keys(compose([ECHO, *overrides])) == []


@pytest.mark.parametrize("name", group_options("conf"))
def test_no_key_of_a_shipped_experiment_is_without_an_effect(name, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    paths = {
        "harbor": [f"env.tasks.{split}.path={split}" for split in ("train", "eval")],
        "sft": ["trainer.warm_start.source.path=rows.jsonl"],
    }
    assert unused_keys(compose([f"conf={name}", *paths.get(name, [])])) == []


def test_what_an_override_switches_off_is_not_said():
    """The experiment's own keys of the warm start wait for another command line."""
    assert unused_keys(compose(["conf=wordle", "trainer.warm_start.steps=0"])) == []


def test_keys_of_ones_own_files_count_and_those_of_shipped_groups_do_not(tmp_path):
    config = compose([ECHO]).config
    key = "trainer.loss.kl.estimator"
    own = {key: tmp_path / "conf" / "trainer" / "mine.yaml"}
    assert len(find_unused(config, own)) == 1
    assert find_unused(config, {key: shipped_dir("conf") / "trainer" / "grpo.yaml"}) == []


def test_terms_of_an_experiment_that_stay_beside_a_chosen_reward_are_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (path := tmp_path / "conf/conf/mine.yaml").parent.mkdir(parents=True)
    term = "{type: success, weight: 1.0, per_turn: false}"
    path.write_text(
        "# @package _global_\ndefaults: [echo, _self_]\n"
        f"reward: {{terms: {{good: {term}, env: {{weight: 0.5}}}}}}\n"
    )
    (said,) = unused_keys(compose(["conf=mine", "reward=catch"]))
    assert said.startswith(f"reward=catch is added to the terms that {path} sets: good; to remove")
    assert said.endswith(": ~reward.terms.good")
    assert unused_keys(compose(["conf=mine"])) == []
    assert unused_keys(compose(["conf=mine", "reward=catch", "~reward.terms.good"])) == []


def test_the_shown_configuration_begins_with_them():
    composed = compose([ECHO, "trainer.loss.kl.estimator=k2"])
    assert as_yaml(composed).startswith("# trainer.loss.kl.estimator has no effect with trainer")
