"""Adapters turn observations into messages and replies into actions. Trap numbers:
tests/README.md."""

import asyncio
from functools import partial

import pytest
from fakes import TEMPLATES

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import PythonAdapterConfig, TextAdapterConfig
from openenv_pipe.environments.adapters import UnusableReply, build_adapter, templates
from openenv_pipe.environments.adapters.text import TextAdapter
from openenv_pipe.errors import ConfigError, SessionError
from openenv_pipe.types import Opening

LIMIT_S = 60  # of `no_hang`


def text_adapter(**changes):
    values = {
        "type": "text",
        **TEMPLATES,
        "first": "word of {{ length }}",
        "following": "{% if marks %}{{ marks }}{% else %}?{% endif %}",
        "pattern": r"(?P<guess>[a-z]{5})(?: (?P<note>\w+))?",
    }
    return TextAdapter(TextAdapterConfig.model_validate(values | changes))


def user(text):
    return {"role": "user", "content": text}


async def no_questions(action):
    raise AssertionError(f"this adapter has nothing to ask, and asked {action}")


async def test_messages_are_rendered_from_the_observation():
    adapter = text_adapter()
    assert await adapter.open({"length": 5}, no_questions) == Opening(messages=[user("word of 5")])
    assert adapter.follow({"marks": "g.y.."}) == [user("g.y..")]
    assert adapter.follow({"marks": ""}) == [user("?")]
    assert adapter.reject("too long") == [user("no: too long")]


async def test_the_system_message_comes_first():
    adapter = text_adapter(system="{{ length }} letters")
    assert (await adapter.open({"length": 5}, no_questions)).messages == [
        {"role": "system", "content": "5 letters"},
        user("word of 5"),
    ]


async def test_examples_are_shown_before_the_first_message():
    adapter = text_adapter(system="s", examples=[{"user": "word of {{ 4 }}", "reply": "four"}])
    assert (await adapter.open({"length": 5}, no_questions)).messages == [
        {"role": "system", "content": "s"},
        user("word of {{ 4 }}"),
        {"role": "assistant", "content": "four"},
        user("word of 5"),
    ]


def test_the_named_groups_that_matched_are_the_action():
    adapter = text_adapter()
    assert adapter.read("I say crane!") == [{"guess": "crane"}]
    assert adapter.read("crane maybe") == [{"guess": "crane", "note": "maybe"}]


@pytest.mark.parametrize("reply", ["", "CRANE", "cran", "�", "\ud800", "\x00" * 1000])
def test_a_reply_that_does_not_match_is_unusable(reply):
    """Trap 21."""
    with pytest.raises(UnusableReply):
        text_adapter().read(reply)


def test_a_field_that_the_observation_lacks_is_a_mistake_of_the_configuration():
    with pytest.raises(ConfigError, match=r"marks.*guess, turns_left"):
        text_adapter().follow({"guess": "crane", "turns_left": 3})


@pytest.mark.parametrize(
    "changes",
    [
        {"first": "{{ length"},
        {"following": "{% if %}"},
        {"following": "{{ length | no_such_filter }}"},
        {"following": "{{" + "(" * 3000},
        {"unusable": "{% for each in why %}" * 30 + "{% endfor %}" * 30},
        {"pattern": "(?P<guess>[a-z"},
        {"pattern": "[a-z]{5}"},
    ],
)
def test_a_broken_template_or_pattern_is_rejected_at_the_start(changes):
    with pytest.raises(ConfigError, match=rf"env\.adapter\.{next(iter(changes))}"):
        text_adapter(**changes)


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{% include 'x' %}", "{{ length() }}", "{{ length | first }}", "{{ [] + 1 }}"],
)
def test_a_template_that_raises_is_a_mistake_of_the_configuration(template):
    with pytest.raises(ConfigError, match="template cannot be rendered"):
        text_adapter(following=template).follow({"length": 5})


def test_what_an_observation_contains_is_not_a_template():
    assert text_adapter().follow({"marks": "{{ 6 * 7 }}"}) == [user("{{ 6 * 7 }}")]


def test_a_template_without_an_end_is_interrupted(monkeypatch, no_hang):
    monkeypatch.setattr(templates, "RENDER_LIMIT_S", 0.01)
    endless = "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
    template = templates.compile_template("first", endless)
    with pytest.raises(ConfigError, match=r"cannot be rendered: not done after 0\.01 s"):
        templates.render_message("user", template, {"r": range(10**6)})


def test_a_template_cannot_reach_python():
    """Templates may come with configurations of other people."""
    adapter = text_adapter(following="{{ ''.__class__.__mro__ }}")
    with pytest.raises(ConfigError):
        adapter.follow({})


class OwnAdapter:
    """An adapter class that `type: python` can name."""

    def __init__(self, *, prefix):
        self.prefix = prefix

    async def open(self, observation, ask):
        return Opening(messages=[user(self.prefix)])

    def read(self, reply):
        return [{"text": reply}]

    def follow(self, observation):
        return [user(str(observation))]

    def reject(self, why):
        return [user(why)]


class SpoiltAdapter(OwnAdapter):
    """An adapter one of whose methods does something that it must not do."""

    def __init__(self, *, method, does):
        super().__init__(prefix="go")
        self.kept = [{"text": "kept", "deep": [1]}]
        own = {"open": self.open, "read": self.read, "follow": self.follow, "reject": self.reject}
        spoil = {"open": self._spoil_open}.get(method, self._spoil)
        setattr(self, method, partial(spoil, own[method], does))

    def _spoil(self, method, does, given):
        match does:
            case "forges what it is given":
                given["text"], given["deep"] = "forged", []
            case "keeps what it returns":
                return self.kept
            case "raises":
                raise asyncio.CancelledError
            case "exits":
                raise SystemExit(0)
            case "returns nonsense":
                return "nonsense"
        return method(given)

    async def _spoil_open(self, method, does, observation, ask):
        self._spoil(dict, does, observation)
        await ask({"type": "look"})
        if does == "returns nonsense":
            return [user("hello")]
        return await method(observation, ask)


def spoilt(method, does):
    options = {"method": method, "does": does}
    target = f"{__name__}:SpoiltAdapter"
    return build_adapter(PythonAdapterConfig(type="python", target=target, options=options))


async def called(adapter, method, given):
    if method != "open":
        return await getattr(adapter, method)(given)

    async def ask(action):
        return {"asked": dict(action)}

    return await adapter.open(given, ask)


METHODS = ["open", "read", "follow", "reject"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("does", ["raises", "exits", "returns nonsense"])
async def test_a_fault_of_a_python_adapter_is_named(method, does):
    """A CancelledError of `open` made the run hang."""
    with pytest.raises(ConfigError, match=r"env\.adapter\.target='.*:SpoiltAdapter'"):
        await called(spoilt(method, does), method, {"text": "seen"} if method == "open" else "x")


@pytest.mark.parametrize("method", ["open", "follow"])
async def test_a_python_adapter_gets_a_copy_of_the_observation(method):
    observation = {"text": "seen", "deep": [1]}
    await called(spoilt(method, "forges what it is given"), method, observation)
    assert observation == {"text": "seen", "deep": [1]}


async def test_what_a_python_adapter_returns_is_copied():
    adapter = spoilt("read", "keeps what it returns")
    (first,) = await adapter.read("x")
    first["deep"].append(2)
    assert await adapter.read("x") == [{"text": "kept", "deep": [1]}]


@pytest.mark.parametrize("error", [SessionError("closed"), asyncio.CancelledError()])
async def test_what_ask_raises_reaches_the_episode(error):
    async def ask(action):
        raise error

    kind = SessionError if isinstance(error, SessionError) else ConfigError
    with pytest.raises(kind):
        await spoilt("open", "nothing").open({}, ask)


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [("OwnAdapter", {}, "prefix"), ("OwnAdapter", {"suffix": 1}, "suffix"), ("dict", {}, "reject")],
)
def test_a_python_adapter_that_cannot_be_one_is_rejected(target, options, words):
    module = "builtins" if target == "dict" else __name__
    config = PythonAdapterConfig(type="python", target=f"{module}:{target}", options=options)
    with pytest.raises(ConfigError, match=words):
        build_adapter(config)


async def test_a_python_adapter_is_built_with_its_options():
    config = PythonAdapterConfig(
        type="python", target=f"{__name__}:OwnAdapter", options={"prefix": "hello"}
    )
    assert (await build_adapter(config).open({}, no_questions)).messages == [user("hello")]


@pytest.mark.parametrize(
    ("pattern", "example"),
    [
        (r"(?i)\b(?P<action>hit|stand)\b", "hit"),
        (r"\b(?P<lot>a|b|c)\b", "a"),
        (r"^(?P<guess>[a-z]{5})$", "abcde"),
        (r"(?s).*<answer>\s*(?P<answer>.*?)\s*</answer>", "...<answer>...</answer>"),
        (r"(?P<row>\d+),(?P<column>\d)", "0,0"),
        (r"(?P<text>[^,]+);", "a;"),
        (r"(?P<text>[^a-f]{2})", "gh"),
        (r"(?P<x>(?:ab){2,}?)", "abab"),
    ],
)
def test_a_rejection_shows_a_reply_that_the_pattern_matches(pattern, example):
    adapter = text_adapter(pattern=pattern)
    assert adapter.read(example)
    with pytest.raises(UnusableReply) as caught:
        adapter.read("?")
    assert str(caught.value).endswith(repr(example))


@pytest.mark.parametrize(
    "pattern", [r"(?P<x>(?P<y>a)(?P=y))", r"(?P<x>b*)$", r"a{900}(?P<x>b)", r"(?P<x>a(?=b)c)"]
)
def test_a_pattern_without_an_example_is_shown_itself(pattern):
    with pytest.raises(UnusableReply) as caught:
        text_adapter(pattern=rf"^z{pattern}").read("?")
    assert str(caught.value).endswith(rf"^z{pattern}")


@pytest.mark.parametrize(
    "reply", ["crane", "I try\ncrane", "<think>\nhouse?\n</think>\n\ncrane", "\n</think>\n\ncrane"]
)
def test_the_guess_of_wordle_is_the_first_word_after_the_thoughts(reply):
    config = compose(["conf=wordle", "model=qwen3_0_6b"]).config
    assert TextAdapter(config.env.adapter).read(reply) == [{"guess": "crane"}]
