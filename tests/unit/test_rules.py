"""Rules between keys: each is broken by a sample, and says what was seen and what to do."""

import re
from copy import deepcopy
from functools import cache

import pytest

from openenv_pipe.config.compose import (
    assign,
    compose,
    compose_env,
    load_values,
    parse_overrides,
    readable_errors,
)
from openenv_pipe.config.composed_files import open_loader
from openenv_pipe.config.rules import BrokenRulesError, all_rules, check_rules
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.schema_keys import known_keys
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.check import checks

SMOKE = ("conf=smoke", "device=cpu")
SHARDED = ("trainer.devices=2", "trainer.parallel=fsdp")
SERVED = "trainer.loss.kl.reference=http://127.0.0.1:8000/v1"
TEACHER = ("trainer=distillation", "trainer.loss.kl.reference=runs/wordle/0001/checkpoints/best")
HINT = ("trainer.loss.kl.hint=feedback", "trainer.loss.kl.coef=1.0")
ROUNDS = "trainer.max_sampling_rounds=2"
LORA = "model.lora.rank=2"
ATTACHED = ("engine=vllm", "engine.launch=attach")
AWAY = "engine.url=http://10.0.0.7:8000"
MERGED = ("engine=vllm", LORA, "engine.publish=merged")
BROADCAST = (*MERGED, "engine.weight_transfer=broadcast")
IPC = (*MERGED, "engine.weight_transfer=ipc")
RAY = "cluster=ray"
ON_NODES = (RAY, "cluster.vllm_on_nodes=true")
PROGRAM = ("agent=program", "agent.command=[sh]")
CLIENT = "agent=client"
NO_HOST = "host=none"
BESIDE = "beside.catch.conf=catch"
LISTED = "{type: server, split: a, seed_start: null, reset: {}}"
STANDARDISED = "reward.transforms.win=[{type: standardise}]"
PLAYERS, FIELDS = "env.players", "turn: turn, rewards: rewards, league: null"
GAME = f"{PLAYERS}={{roles: {{x: policy, o: policy}}, {FIELDS}}}"
LEAGUE = "env.players.league={every: 1, size: 1, share: 1.0}"
RANDOM = "env.baselines={random: a.b:c}"
EARLIER = "eval.opponent=RUN/checkpoints/step_000100"
TOOLS = (
    "{type: tool, system: null, examples: [], first: null, following: null, unusable: why, "
    "plain_reply: final}"
)
EVERY = "eval.during.every=1"


def term(text: str) -> str:
    return f"+reward.terms.it={{{text}, weight: 1.0}}"


# Keys that a group leaves to the user, so it is not composed without them.
REQUIRED = (*("engine.policy", "agent.command", "agent.sandbox.image", "trainer.advantage.target"),)

# Overrides that break a rule, and the keys of that rule.
BROKEN = [
    (
        ["env.tasks.eval.seed_start=0", "env.tasks.eval.reset.split=train"],
        "env.tasks.train env.tasks.eval",
    ),
    ([BESIDE, *PROGRAM], "beside agent"),
    ([BESIDE, RAY], "beside cluster"),
    (["beside.wordle.conf=echo"], "beside env.name"),
    ([BESIDE, "beside.catch.teacher=RUN"], "beside.catch.teacher trainer.loss.kl.reference"),
    (["eval.num_tasks=10000"], "eval.num_tasks env.tasks.eval.num_tasks"),
    (
        [f"{PLAYERS}={{roles: {{x: policy, o: nobody}}, {FIELDS}}}"],
        "env.players.roles.o env.baselines",
    ),
    ([f"{PLAYERS}={{roles: {{x: untrained, o: untrained}}, {FIELDS}}}"], "env.players.roles"),
    (["eval.opponent=perfect"], "eval.opponent env.players env.baselines"),
    ([GAME, EARLIER, "engine=vllm"], "eval.opponent engine"),
    ([GAME, LEAGUE, "engine=vllm"], "env.players.league engine"),
    ([GAME, LEAGUE, *SHARDED], "env.players.league trainer.parallel"),
    (
        [f"{PLAYERS}={{roles: {{x: policy, o: random}}, {FIELDS}}}", LEAGUE, RANDOM],
        "env.players.league env.players.roles",
    ),
    ([GAME, EARLIER, *SHARDED], "eval.opponent trainer.parallel"),
    ([GAME, *PROGRAM], "env.players agent"),
    ([GAME, RAY], "env.players cluster"),
    ([GAME, f"env.adapter={TOOLS}"], "env.players env.adapter.type"),
    ([NO_HOST], "host agent"),
    (
        ["trainer=maxrl", "trainer.advantage.baseline=leave_one_out"],
        "trainer.advantage.scale trainer.advantage.baseline",
    ),
    (
        ["trainer=gdpo", "+reward.transforms.win=[{type: multiply}]"],
        "reward.transforms.win trainer.advantage.scale",
    ),
    (
        ["trainer=gdpo", "trainer.max_sampling_rounds=2"],
        "trainer.max_sampling_rounds trainer.advantage.scale",
    ),
    (["trainer=cispo", "trainer.loss.max_ratio=4.0"], "trainer.loss.max_ratio trainer.loss.type"),
    (
        ["trainer.loss.clip_high=0.5", "trainer.loss.max_ratio=1.5"],
        "trainer.loss.max_ratio trainer.loss.clip_high",
    ),
    ([NO_HOST, "trainer.steps=0", "trainer.warm_start.steps=0"], "host agent"),
    (
        ["trainer.guard=back", "trainer.max_staleness=1"],
        "trainer.guard trainer.max_staleness trainer.devices",
    ),
    ([NO_HOST, CLIENT], "host trainer.warm_start.source trainer.warm_start.steps"),
    (
        [NO_HOST, CLIENT, f"env.tasks.train={LISTED}"],
        "host env.tasks.train.type",
    ),
    (
        [NO_HOST, CLIENT, f"env.tasks.eval={LISTED}"],
        "host env.tasks.eval.type",
    ),
    ([CLIENT, "agent.host=0.0.0.0"], "agent.host agent.token"),
    ([CLIENT, EVERY], "agent eval.during.every"),
    ([CLIENT], "agent"),
    ([NO_HOST, CLIENT, "trainer.warm_start.steps=0"], "agent host"),
    ([RAY, *PROGRAM], "cluster agent"),
    ([RAY, "host=docker"], "cluster host"),
    ([RAY, "host.port=9999"], "cluster host.port"),
    (["eval.greedy=true", "eval.temperature=0.0"], "eval.greedy eval.temperature"),
    (["eval.samples_per_task=1000000", "eval.num_tasks=2"], "eval.num_tasks eval.samples_per_task"),
    (
        ["eval.num_resamples=1000000", "eval.num_tasks=101", "env.tasks.eval.num_tasks=101"],
        "eval.num_resamples eval.num_tasks",
    ),
    (
        [EVERY, "eval.num_tasks=2", "eval.during.num_tasks=3"],
        "eval.during.num_tasks eval.num_tasks",
    ),
    (["eval.during.stop.at=1.0"], "eval.during.stop.at eval.during.every"),
    (
        [EVERY, "eval.num_tasks=1", "eval.during.stop.at=1.0", "eval.during.stop.bound=low"],
        "eval.during.stop.bound eval.during.num_tasks eval.num_tasks",
    ),
    (
        ["trainer.checkpoint.best.metric=eval/reward"],
        "trainer.checkpoint.best.metric eval.during.every",
    ),
    (
        [EVERY, "eval.during.stop.at=1.0", "eval.during.stop.measure=reward", STANDARDISED],
        "eval.during.stop.measure reward.terms.win",
    ),
    (
        [EVERY, "trainer.checkpoint.best.metric=eval/reward", STANDARDISED],
        "trainer.checkpoint.best.metric reward.terms.win",
    ),
    (
        [term("type: overlong, per_turn: false, limit_tokens: 100000, buffer_share: 0.1")],
        "reward.terms.it.limit_tokens env.max_episode_tokens",
    ),
    (
        [term("type: ruler, per_turn: false, rubric: good, num_orders: 1, max_group: 4")],
        "reward.terms.it judge",
    ),
    (["+reward.transforms.nothing=[]"], "reward.transforms.nothing"),
    (
        [term("type: turns, per_turn: true"), "+reward.transforms.it=[{type: multiply}]"],
        "reward.transforms.it reward.terms.it.per_turn",
    ),
    (
        [
            "reward.terms.win.weight=2.0",
            "+reward.transforms.win=[{type: multiply}]",
        ],
        "reward.transforms.win reward.terms.win.weight",
    ),
    (["engine=scripted", "engine.policy=a.b:c"], "engine"),
    (["trainer.max_staleness=2"], "trainer.max_staleness engine"),
    (["engine=scripted", "engine.policy=a.b:c", *PROGRAM], "agent engine"),
    (["engine=vllm", "engine.sampling.top_p=0.9"], "engine.sampling.top_p"),
    (["engine.sampling.top_k=5"], "engine.sampling.top_k"),
    (["engine=vllm", "engine.max_model_len=20"], "engine.max_model_len env.max_episode_tokens"),
    ([*ATTACHED, "engine.url=null"], "engine.launch engine.url"),
    ([*ATTACHED, AWAY, "engine.num_servers=2"], "engine.launch engine.num_servers"),
    (["engine=vllm", LORA, "engine.publish=full"], "engine.publish model.lora.rank"),
    (["engine=vllm", "engine.publish=merged"], "engine.publish model.lora.rank"),
    (
        ["engine=vllm", LORA, "engine.publish=adapter", "engine.weight_transfer=broadcast"],
        "engine.weight_transfer engine.publish model.lora.rank",
    ),
    ([*BROADCAST, "engine.launch=docker"], "engine.weight_transfer engine.launch"),
    ([*BROADCAST, "engine.sleep=level1"], "engine.weight_transfer engine.sleep"),
    ([*BROADCAST, "engine.arguments=['-dp=2']"], "engine.weight_transfer engine.arguments"),
    (
        [*IPC, "engine.arguments=['--tensor_parallel_size=2']"],
        "engine.weight_transfer engine.arguments",
    ),
    ([*IPC, "engine.launch=attach", AWAY], "engine.weight_transfer engine.url"),
    (
        ["engine=vllm", "engine.sleep=level1", "trainer.max_staleness=1"],
        "engine.sleep trainer.max_staleness",
    ),
    (
        ["engine=vllm", LORA, "engine.publish=adapter", "engine.sleep=level2"],
        "engine.sleep engine.publish model.lora.rank",
    ),
    ([*ON_NODES], "cluster.vllm_on_nodes engine"),
    ([*ON_NODES, *ATTACHED, AWAY], "cluster.vllm_on_nodes engine"),
    ([*ON_NODES, *IPC], "cluster.vllm_on_nodes engine.weight_transfer"),
    ([*ON_NODES, "engine=vllm", "engine.sleep=level1"], "cluster.vllm_on_nodes engine.sleep"),
    (
        [ROUNDS, "trainer=grpo", "trainer/advantage=python", "trainer.advantage.target=a:b"],
        "trainer.max_sampling_rounds trainer.advantage.type",
    ),
    (
        [ROUNDS, "trainer.advantage.baseline=batch", "trainer.advantage.scale=batch"],
        "trainer.max_sampling_rounds trainer.advantage.baseline",
    ),
    (
        [ROUNDS, "trainer.loss.normalise_groups=with_signal", "trainer.advantage.scale=batch"],
        "trainer.max_sampling_rounds trainer.advantage.scale",
    ),
    (["trainer.loss.echo_coef=0.1", "env.max_turns=1"], "trainer.loss.echo_coef env.max_turns"),
    (["trainer.loss.echo_coef=0.1", CLIENT], "trainer.loss.echo_coef agent"),
    ([*HINT, "trainer.loss.kl.reference=a"], "trainer.loss.kl.hint trainer.loss.kl.reference"),
    (
        [*HINT, "trainer.loss.kl.refresh_every=5"],
        "trainer.loss.kl.hint trainer.loss.kl.refresh_every",
    ),
    ([*HINT, "trainer.loss.kl.estimator=exact"], "trainer.loss.kl.hint trainer.loss.kl.estimator"),
    (
        [*HINT, "trainer.loss.normalise_groups=with_signal"],
        "trainer.loss.kl.hint trainer.loss.normalise_groups",
    ),
    ([*HINT, CLIENT], "trainer.loss.kl.hint agent"),
    (
        ["trainer.replay={coef: 1.0, size: 4, min_reward: null, per_step: 5}"],
        "trainer.replay.per_step trainer.replay.size",
    ),
    (
        ["trainer.replay={coef: 1.0, size: 4, min_reward: 1.0, per_step: 4}", STANDARDISED],
        "reward.terms.win trainer.replay",
    ),
    (
        ["trainer.loss.policy_coef=0"],
        "trainer.loss.policy_coef trainer.loss.kl.coef trainer.loss.kl.reference",
    ),
    (
        ["trainer.loss.kl.coef=1.0", "trainer.loss.kl.estimator=exact"],
        "trainer.loss.kl.estimator trainer.loss.kl.reference",
    ),
    (
        [*TEACHER, "trainer.loss.kl.refresh_every=5"],
        "trainer.loss.kl.reference trainer.loss.kl.refresh_every",
    ),
    (
        [*TEACHER, "trainer.loss.normalise_groups=with_signal"],
        "trainer.loss.kl.reference trainer.loss.normalise_groups",
    ),
    (
        [*TEACHER, "trainer.devices=2"],
        "trainer.loss.kl.reference trainer.devices",
    ),
    (
        ["trainer=distillation", SERVED],
        "trainer.loss.kl.reference trainer.loss.kl.estimator",
    ),
    (
        ["trainer=distillation", SERVED, "trainer.loss.kl.estimator=k2", "trainer.temperature=0.7"],
        "trainer.loss.kl.reference trainer.temperature",
    ),
    (
        ["trainer.loss.correction.low=1.0"],
        "trainer.loss.correction.low trainer.loss.correction.high",
    ),
    ([*SHARDED, "trainer.optimizer.type=muon"], "trainer.optimizer.type trainer.parallel"),
    (
        [*SHARDED, "trainer.warm_start.optimizer.type=muon"],
        "trainer.warm_start.optimizer.type trainer.parallel",
    ),
    (["trainer.replicas=2", "trainer.devices=4"], "trainer.replicas trainer.parallel"),
    ([*SHARDED, "trainer.replicas=2"], "trainer.replicas trainer.devices"),
    (
        [RAY, "cluster.learner_nodes=2", "trainer.devices=3"],
        "cluster.learner_nodes trainer.devices",
    ),
    (
        [*SHARDED, "trainer.max_staleness=1"],
        "trainer.max_staleness trainer.parallel engine",
    ),
    (
        [*SHARDED, LORA, "model.quantization=nf4"],
        "model.quantization trainer.parallel",
    ),
    (["model.quantization=nf4"], "model.quantization model.lora.rank"),
    (["model.dtype=bfloat16"], "model.dtype model.lora.rank"),
    (["model.num_heads=3", "model.num_kv_heads=2"], "model.num_heads model.num_kv_heads"),
    (["model.max_length=8"], "env.max_episode_tokens model.max_length"),
]
# Those whose overrides set the keys of the rule and no other, in its order.
NAMES_ITS_KEYS = [
    ["trainer.guard=back", "trainer.checkpoint.best=null"],
    ["+reward.transforms.win=[{type: multiply}, {type: only_success}]"],
    ["+reward.transforms.win=[{type: clip, low: 2.0, high: 1.0}]"],
    ["trainer.tasks_per_step=1000", "trainer.group_size=1001"],
    ["trainer.warm_start.steps=1", "trainer.warm_start.source.policy=null"],
    [ROUNDS, "trainer.loss.normalise_groups=all"],
    ["trainer.advantage.baseline=batch", "trainer.advantage.scale=group"],
    ["trainer.loss.type=gspo", "trainer.loss.normalise=token"],
    ["trainer.loss.kl.estimator=k1", "trainer.loss.kl.importance_weights=false"],
    ["trainer.loss.echo_coef=0.1", "trainer.loss.normalise_groups=with_signal"],
]
for each in NAMES_ITS_KEYS:
    names = (override.partition("=")[0].removeprefix("+") for override in each)
    BROKEN.append((each, " ".join(names)))


@cache
def composed(choices: tuple[str, ...]) -> dict:
    return load_values(open_loader(), [*SMOKE, *choices])


def violations(overrides: list[str]) -> list[str]:
    """What is wrong with the smoke experiment and these overrides. Groups are composed once."""
    choices, keys = [], []
    for override in parse_overrides(overrides):
        key = override.key_or_group
        is_choice = "." not in key or "/" in key or key in REQUIRED or key.endswith(".conf")
        (choices if is_choice else keys).append(override)
    values = deepcopy(composed(tuple(each.input_line for each in choices)))
    for override in keys:
        assign(values, override.key_or_group, override.value())
    try:
        with readable_errors():
            config = RunConfig.model_validate(values)
    except ConfigError as error:
        return re.sub(r" \(all keys, .*|^\(all keys, .*", "", str(error)).splitlines()
    try:
        check_rules(config, "train", "play", "eval")
    except BrokenRulesError as error:
        return list(error.messages)
    return []


@pytest.mark.parametrize(("overrides", "keys"), BROKEN, ids=[keys for _, keys in BROKEN])
def test_settings_that_do_not_go_together_are_rejected_by_key_and_value(overrides, keys):
    start = "=.* (?:with|and) ".join(re.escape(key) for key in keys.split()) + "=.*: .+"
    found = [each for each in violations(overrides) if re.fullmatch(rf"[ -]*{start}", each)]
    assert found, violations(overrides)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [term("type: python, target: 'a:b', keywords: {}, use: mean, per_turn: true")],
            "reward.terms.it: use=mean with per_turn=true: ",
        ),
        (
            [
                term(
                    "type: rubric, per_turn: false, weights: {a: 1.0}, gates: [a], "
                    "when_missing: null"
                )
            ],
            "reward.terms.it: gates=['a'] with weights=['a']: ",
        ),
        (
            ["agent=harbor", "agent/sandbox=docker", "agent.sandbox.image=a:1"],
            "agent: reward_from=harbor with sandbox.type=docker: ",
        ),
    ],
)
def test_keys_of_one_block_that_do_not_go_together_are_rejected(overrides, problem):
    assert violations(overrides)[0].startswith(problem)


# Neighbours of the samples above.
VALID = [
    [RAY, "cluster.learner_nodes=2", "trainer.devices=6"],
    [*ON_NODES, "engine=vllm"],
    [*SHARDED, "trainer.devices=4", "trainer.replicas=2"],
    [*IPC, "engine.launch=attach", "engine.url='http://[::1]:8000'"],
    [*IPC, "engine.sleep=level2"],
    [EVERY, "eval.num_tasks=1", "eval.during.stop.at=1.0", "eval.during.stop.bound=mean"],
    [NO_HOST, CLIENT, "trainer.warm_start.steps=0"],
    [*PROGRAM, "engine=vllm"],
    ["trainer.guard=back"],
]


@pytest.mark.parametrize("overrides", VALID, ids=" ".join)
def test_settings_that_go_together_are_accepted(overrides):
    assert not [each for each in violations(overrides) if not each.startswith("agent=client")]


def test_an_evaluation_plays_no_league():
    config = compose(["conf=smoke", GAME, LEAGUE, "engine=vllm"]).config
    check_rules(config, "play", "eval")
    with pytest.raises(BrokenRulesError, match=r"env\.players\.league="):
        check_rules(config, "train", "play")


def test_every_rule_has_a_sample_that_breaks_it():
    broken = []
    for overrides, _ in BROKEN:
        text = "\n".join(violations(overrides))
        for rule in all_rules():
            parts = re.split(r"\{.+?\}", rule.advice)  # between the values
            if re.search(".+".join(map(re.escape, parts)), text):
                broken.append(rule)
    assert [rule.keys for rule in all_rules() if rule not in broken] == []


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: " ".join(rule.keys))
def test_a_rule_is_about_keys_that_exist(rule):
    known = known_keys()
    for key in rule.keys:
        assert key.partition(".*")[0] in known


def test_all_violations_are_reported_at_once():
    message = "\n".join(
        violations(["trainer.loss.correction.low=1.0", "eval.num_tasks=10000", "host=none"])
    )
    assert message.startswith("4 problems")
    for key in ("correction.low=1.0", "eval.num_tasks=10000", "host=none with agent=loop"):
        assert key in message


def test_names_with_points_are_names():
    """One of them may begin with another one and a point."""
    values = compose(["conf=echo"]).config.model_dump()
    late = {"type": "overlong", "limit_tokens": 10**6, "buffer_share": 0.1}
    values["reward"]["terms"] |= {
        "cut": {"type": "length", "weight": 1.0, "per_turn": False},
        "cut.late": {**late, "weight": 1.0, "per_turn": False},
    }
    with pytest.raises(ValueError, match=r"reward\.terms\.cut\.late\.limit_tokens=1000000 with"):
        RunConfig.model_validate(values)


def test_a_value_that_is_a_secret_is_not_shown(monkeypatch):
    monkeypatch.setenv("SERVER_TOKEN", "very-secret-value")
    url = "engine.url=http://10.0.0.7:8000/very-secret-value"
    (message,) = violations([*IPC, "engine.launch=attach", url])
    assert "very-secret-value" not in message
    assert "<hidden: SERVER_TOKEN>" in message


def test_an_environment_alone_follows_its_own_rules():
    with pytest.raises(ConfigError, match=r"env\.tasks\.train=range .* share tasks"):
        compose_env(
            ["env=wordle", "env.tasks.eval.seed_start=0", "env.tasks.eval.reset.split=train"]
        )


def test_check_lists_how_many_rules_of_each_block_it_has_checked(monkeypatch):
    monkeypatch.setattr(checks, "TRIALS", {})
    lines = checks.run_checks(compose([*SMOKE, "num_threads=1"]).config)
    (line,) = [line for line in lines if line.name == "settings"]
    num_rules = sum(rule.when != "eval" for rule in all_rules())
    assert line.text.startswith(f"{num_rules} rules between keys hold: ")
    counts = re.findall(r"(\d+) of (?:agent|cluster|engine|env|eval|host|model)\b", line.text)
    assert len(counts) == 7
