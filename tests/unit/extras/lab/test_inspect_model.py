"""What `env inspect model=...` writes for a chat model: the model, limits, prompts, the example."""

from dataclasses import replace

import pytest
from fakes import run_config
from families import make_family
from test_inspect_env import description
from test_inspect_trial import TASK, played, tried

from openenv_pipe.commands import machine
from openenv_pipe.config.schema import ServingConfig
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.tasks.sets import RangeTasks
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.chat_prompts import ChatPrompts, adapter_block, is_description
from openenv_pipe.extras.lab.experiment import (
    Limits,
    TrainedModel,
    find_model,
    fit_limits,
    fit_memory,
    for_model,
    split_overrides,
    tiny_model,
)
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.memory_estimate import at_rest, memory_bytes, tiny_shape, while_learning
from openenv_pipe.models.tiny import build_tokenizer

CONFIG = run_config()
TEXT = {"text": {"type": "string", "maxLength": 5, "description": "What to say"}}
ORDER = {"side": {"enum": ["buy", "sell"]}, "amount": {"type": "integer", "minimum": 1}}
CALL = {"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}}
CHATML = (
    "{% for each in messages %}{{ '<|im_start|>' + each.role + '\n' + each.content + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatml():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    return ChatFormat(tokenizer)


def hub_model(**keys):
    given = {"choice": "hub", "keys": {}, "chat": chatml(), "max_length": None, "reads": True}
    return TrainedModel(**given | keys)


def acted(*actions_and_rewards, seed=0, **observation):
    """Return an episode of these actions, with one reward each."""
    actions, rewards = zip(*actions_and_rewards, strict=True)
    play = played(*rewards, **observation)
    play.task = replace(TASK, id=f"train/{seed}", index=seed, seed=seed)
    play.actions = list(actions)
    return play


def prompts_of(*plays, fields=TEXT, seed_start=1000, takes_tools=False):
    numbered = {"seed_start": seed_start, "num_tasks": 10, "index_key": None, "reset": {}}
    tasks = CONFIG.env.tasks.eval.model_copy(update=numbered)
    found = description(fields)
    return ChatPrompts.of(
        tried(*plays), CONFIG.env, found.action, RangeTasks("eval", tasks), takes_tools=takes_tools
    )


# --- the example ---------------------------------------------------------------------------------


def test_the_examples_are_the_best_with_what_they_reply_to():
    prompts = prompts_of(
        acted(({"text": "a"}, 0.0), ({"text": "b"}, 1.5), text="x"),
        acted(({"text": "c"}, 1.5), ({"text": "d"}, None), seed=1, text="y"),
    )
    assert prompts.exchanges("text", {"following": "saw {{ text }}"}) == [
        {"user": "saw x", "reply": "b"},
        {"user": '{"text":"y"}', "reply": "c"},
    ]
    note, _ = prompts.notes("text")
    assert "'b' is a random action of task train/0 (seed 0)" in note
    assert "not a task of the evaluation; it earned 1.5, the most" in note


def test_no_task_of_the_evaluation_is_given_away():
    first = acted(({"text": "a"}, 0.5), ({"text": "b"}, 0.0), text="x")
    second = acted(({"text": "c"}, 0.25), ({"text": "d"}, 0.0), seed=1, text="y")
    assert not prompts_of(first, second, seed_start=0).examples
    # Without the seed 0, the second episode's is the best.
    first.task = replace(first.task, seed=1000)
    assert prompts_of(first, second).examples[0].action == {"text": "c"}
    # Tasks that look alike may be one and the same, which the best action solves.
    alike = [acted(({"text": "a"}, 1.0), ({"text": "b"}, 0.25)), acted(({"text": "c"}, 0.0))]
    assert prompts_of(*alike).examples[0].action == {"text": "b"}
    choices = {"text": {"type": "string", "enum": ["a", "b", "c"]}}
    shown = prompts_of(*alike, fields=choices).examples
    assert [each.action["text"] for each in shown] == ["a", "b", "c"]
    assert [each.is_best for each in shown] == [True, False, False]


def test_an_action_that_shows_nothing_is_no_example():
    long, failed = (
        acted(({"text": "a" * 500}, 1.0), text="x"),
        acted(({"text": "b"}, 1.0), text="y"),
    )
    failed.results[1] = StepResult({"error": "no such tool"}, 1.0, True)
    assert not prompts_of(long, failed).examples
    # Random letters that are not right say less than the request does.
    wrong = prompts_of(acted(({"text": "a"}, 0.5), ({"text": "b"}, 0.0), text="x"))
    assert wrong.exchanges("text", {}) == []
    assert "write some into env.adapter.examples" in next(wrong.notes("text"))
    # Of JSON, it shows the form.
    order = prompts_of(acted(({"side": "buy", "amount": 2}, 0.0), text="x"), fields=ORDER)
    (shown,) = order.exchanges("json", {})
    assert shown == {"user": '{"text":"x"}', "reply": '{"side": "buy", "amount": 2}'}
    assert "shows the form" in next(order.notes("json"))


# --- the text of the system ----------------------------------------------------------------------


def test_the_request_has_the_bounds_and_the_descriptions():
    prompts = prompts_of(acted(({"text": "a"}, 0.0), text="x"))
    found = replace(description(TEXT, description="One word"), text="Guess the word")
    assert prompts.system("text", found) == (
        "Guess the word.\nAn action: One word.\n"
        "Reply with the text and nothing else: at most 5 characters. What to say."
    )
    nothing = replace(found, text="MyEnvironment environment")
    assert prompts.system("text", nothing).startswith("An action: One word.\n")


def test_moves_that_are_always_legal_are_choices():
    legal = {"legal_actions": ["go", "go on"], "text": "x"}
    play = acted(({"text": "go"}, 0.0), **legal)
    prompts = prompts_of(play)
    kind, keys = adapter_block(description(TEXT), tried(play), prompts)
    assert (kind, keys["pattern"]) == ("text", r"\b(?P<text>go\ on|go)\b")
    adapter = build_adapter(
        run_config({f"env.adapter.{key}": keys[key] for key in keys}).env.adapter
    )
    assert adapter.read("I go on.") == [{"text": "go on"}]
    assert keys["system"].endswith("nothing else: go, go on.")
    assert [each["reply"] for each in keys["examples"]] == ["go"]
    assert "go" not in adapter_block(description(TEXT), tried(play))[1]["pattern"]
    other = acted(({"text": "go"}, 0.0), seed=1, text="y", legal_actions=["go"])
    changing = prompts_of(play, other)
    assert changing.moves == ()
    said = changing.system("text", description(TEXT))
    assert "It has to be one of the legal_actions that you are shown." in said


def test_a_call_is_shown_in_the_form_that_the_model_is_told_of():
    call = {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}
    play = acted((call, 0.5), text="x")
    said = prompts_of(play, fields=CALL).system("tool", description(CALL))
    assert said.endswith(
        'For example:\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    )
    own = prompts_of(play, fields=CALL, takes_tools=True).system("tool", description(CALL))
    assert own.endswith('For example:\ncall add with {"a": 1}')


def test_words_of_a_server_mean_nothing_in_a_prompt():
    fields = {"side": {"type": "string"}, "note": {"type": "string"}}
    hostile = "${oc.env:HOME} {{ 7 * 7 }} {% raw %}"
    play = acted(({"side": hostile, "note": "}}"}, 0.0), text="x")
    found = replace(description(fields), text=hostile)
    said = prompts_of(play, fields=fields).system("json", found)
    assert said.count("{{") == 1 and "{{ action_schema }}" in said
    assert "${" not in said and "{%" not in said


# --- limits --------------------------------------------------------------------------------------


async def test_limits_are_in_tokens_of_the_models_own_template():
    trial = tried(played(0, 0, 0, text="x" * 40))
    adapter = build_adapter(CONFIG.env.adapter)
    model = hub_model()
    found = await fit_limits(CONFIG.env, adapter, trial, model)
    chat, opening = model.chat, await adapter.open({"text": "x" * 40}, None)
    (following,) = [adapter.follow({"text": "x" * 40})]
    needed = len(chat.first_ids(opening.messages)) + 2 * len(
        chat.following_ids(following, end=None)
    )
    assert found.max_turns == 4
    assert needed + 3 * found.max_reply_tokens <= found.max_episode_tokens
    small = await fit_limits(CONFIG.env, adapter, trial, tiny_model())
    assert found.max_episode_tokens > small.max_episode_tokens, "the markup counts"


async def test_limits_keep_to_the_models_context():
    trial = tried(played(*[0] * 8, text="x" * 100))
    adapter = build_adapter(CONFIG.env.adapter)
    free = await fit_limits(CONFIG.env, adapter, trial, hub_model())
    assert free.max_turns == 8 and free.max_episode_tokens > 700
    held = await fit_limits(CONFIG.env, adapter, trial, hub_model(max_length=700))
    assert held.max_episode_tokens <= 700 and held.max_turns < free.max_turns


async def test_a_choice_has_room_for_words_around_it():
    adapter = CONFIG.env.adapter.model_copy(update={"pattern": r"\b(?P<text>a|b)\b"})
    env = CONFIG.env.model_copy(update={"adapter": adapter})
    trial, built = tried(played(0)), build_adapter(adapter)
    assert (await fit_limits(env, built, trial, hub_model())).max_reply_tokens == 32
    assert (await fit_limits(env, built, trial, tiny_model())).max_reply_tokens == 3


def test_batches_fit_the_memory_that_is_free(monkeypatch):
    """First the trainer's, down to one episode, then the engine's."""
    config = run_config({"env.max_episode_tokens": 1000, "model.max_length": 1000})
    monkeypatch.setattr(machine, "_available_memory", lambda device: ("machine", 1 << 40))
    assert fit_memory(config) == {}
    shape = tiny_shape(config.model)

    def needed(tokens, num_sampled):
        small = config.trainer.model_copy(update={"tokens_per_batch": tokens})
        engine = config.engine.model_copy(update={"max_batch": num_sampled})
        changed = config.model_copy(update={"trainer": small, "engine": engine})
        held = memory_bytes(shape, changed, in_one_memory=True)
        moments = while_learning(held, changed), at_rest(held)
        return max(sum(moment.values()) for moment in moments)

    for tokens, num_sampled in ((2048, None), (1000, 32)):
        available = int(needed(tokens, num_sampled) / machine.TIGHT) + 1
        monkeypatch.setattr(machine, "_available_memory", lambda _, a=available: ("machine", a))
        expected = {"trainer": {"tokens_per_batch": tokens}}
        expected |= {"engine": {"max_batch": num_sampled}} if num_sampled else {}
        assert fit_memory(config) == expected
    monkeypatch.setattr(machine, "_available_memory", lambda device: ("machine", 1))
    assert fit_memory(config)["engine"] == {"max_batch": 1}


# --- the model -----------------------------------------------------------------------------------


def test_what_is_written_names_the_model_and_no_rate(tmp_path):
    folder = make_family(tmp_path / "model", "LlamaConfig")
    model = find_model(["model=hub", f"model.path={folder}", "model.lora.rank=4"], print)
    assert (model.choice, model.max_length, model.reads) == ("hub", 2048, True)
    limits = Limits(
        max_turns=2, max_reply_tokens=16, max_episode_tokens=99, max_observation_tokens=None
    )
    serving = ServingConfig(env=CONFIG.env, host=CONFIG.host)
    assert for_model(serving, tried(played(0)), limits, model) == {
        "env": {"max_turns": 2, "max_reply_tokens": 16, "max_episode_tokens": 99},
        "model": {"path": str(folder), "lora": {"rank": 4}},
    }
    assert find_model(["model=tiny", "model.hidden_size=64"], print).keys == {"hidden_size": 64}
    assert find_model([], print).choice == "tiny"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model=smollm2"], "smollm2_135m"),
        (["model=hub"], r"model\.path"),
        (["model.path=x"], "path"),
        (["model=hub", "model.path=x", "~model.lora"], r"model\.lora is missing"),
        (["model=hub", "model.path=./nothing"], r"model\.path='\./nothing'"),
    ],
)
def test_a_model_that_is_none_is_explained(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        find_model(overrides, print)


def test_a_model_without_a_chat_template_is_explained(tmp_path):
    folder = make_family(tmp_path / "model", "LlamaConfig")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"no chat template; set model\.chat_template"):
        find_model(["model=hub", f"model.path={folder}"], print)


def test_overrides_of_the_model_are_set_apart():
    given = ["env.max_turns=3", "model=hub", "host=docker", "+model.path=x"]
    assert split_overrides(given) == (
        ["model=hub", "+model.path=x"],
        ["env.max_turns=3", "host=docker"],
    )


@pytest.mark.parametrize(
    ("text", "is_written"),
    [
        ("Sort four digits.", True),
        ("SwapsortEnvironment environment", False),
        ("Base class for all environment servers.", False),
        ("", False),
    ],
)
def test_a_text_of_openenvs_classes_is_no_description(text, is_written):
    assert is_description(text) is is_written
