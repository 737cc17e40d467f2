"""A turn ends at any of the tokens that the model's template and settings name."""

import json

import pytest
from fakes import all_episodes, collect, local_engine, run_config, tiny_policy
from test_chat_template import CHATML, qwen_tokenizer
from test_rerender import TOOL, stock_tokenizer, user
from test_safetensors_only import hub_model

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.load import load_chat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.types import Finish

# The next message's first token ends a reply, as in the models of GLM.
NEXT_ROLE = (
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' ~ m.role ~ '|>' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
RESULT = {"role": "tool", "name": "add", "content": "3"}


def format_of(tokenizer, *more, history="append"):
    return ChatFormat(tokenizer, history, None, tokenizer.convert_tokens_to_ids([*more]))


def texts_of(chat, ids):
    return chat.tokenizer.convert_ids_to_tokens([*ids])


def next_role_format():
    tokenizer = qwen_tokenizer("{% if tools %}{{ tools | tojson }}{% endif %}" + NEXT_ROLE)
    names = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return format_of(tokenizer, "<|endoftext|>", "<|user|>", "<|observation|>")


def test_the_settings_add_ends_to_that_of_the_template():
    chat = format_of(qwen_tokenizer(CHATML), "<|endoftext|>")
    assert {*texts_of(chat, chat.ends.ids)} == {"<|im_end|>", "<|endoftext|>"}
    (other,) = chat.ends.ids - {chat.ends.usual}
    reply = chat.encode("a")
    for end in chat.ends.ids:
        assert chat.reply_text([*reply, end]) == "a"
    after = chat.following_ids([user("b")], end=chat.ends.usual)
    assert chat.following_ids([user("b")], end=other) == after
    assert chat.following_ids([user("b")], end=None) == [chat.ends.usual, *after]


def test_a_call_of_gpt_oss_ends_a_turn_and_is_complete_only_with_its_end():
    chat = format_of(stock_tokenizer("gptoss"), history="rerender")
    assert {*texts_of(chat, chat.ends.ids)} == {"<|return|>", "<|call|>"}
    text = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    for end, num_calls in (("<|call|>", 1), ("", 0)):
        reply = chat.reply_text(chat.encode(text + end))
        made = chat.reply_reader.read(reply, [TOOL]).made_calls
        assert len(made) == num_calls, reply


@pytest.mark.parametrize(("name", "end"), [("llama3_1", "<|eom_id|>"), ("gemma3", "<eos>")])
def test_ends_of_stock_templates(name, end):
    tokenizer = stock_tokenizer(name)
    tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    chat = format_of(tokenizer, end, history="rerender")
    assert end in texts_of(chat, chat.ends.ids)
    assert chat.ends.text != end


def test_a_reply_ends_with_the_first_token_of_the_next_message():
    chat = next_role_format()
    assert chat.ends.text == ""
    for reply, following, end in (("a", user("b"), "<|user|>"), (CALL, RESULT, "<|observation|>")):
        ids = [*chat.first_ids([user("q")]), *chat.reply_ids(reply)]
        assert texts_of(chat, ids[-1:]) == [end]
        assert chat.reply_text(chat.reply_ids(reply)) == reply
        conversation = [user("q"), {"role": "assistant", "content": reply}, following]
        whole = chat.rendered_ids(conversation, (), {1: None})
        assert ids + chat.following_ids([following], end=ids[-1]) == whole
        # A truncated reply: the next message brings the token.
        assert ids[:-1] + chat.following_ids([following], end=None) == whole


def test_a_reply_that_announces_another_role_keeps_its_end():
    chat = next_role_format()
    observation = chat.reply_ids(CALL)[-1]
    following = chat.following_ids([user("b")], end=observation)
    assert texts_of(chat, following) == ["<|user|>", "b", "<|assistant|>"]


def test_nothing_that_ends_a_turn_is_rejected():
    tokenizer = qwen_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(ConfigError, match=r"does not end the model's turn.*generation_con"):
        format_of(tokenizer, "<|endoftext|>")


async def test_the_local_engine_stops_at_every_end():
    policy = tiny_policy(ends=True)
    other = 70
    policy.end_ids = policy.chat.ends.ids | {other}
    embeddings = policy.model.get_input_embeddings().weight.data
    embeddings[other] = embeddings[policy.chat.ends.usual] * 0.99
    groups = await collect(
        policy, engine=local_engine(policy), config=run_config({"env.max_reply_tokens": 8})
    )
    turns = [turn for episode in all_episodes(groups) for turn in episode.turns]
    last = {turn.completion_ids[-1] for turn in turns if turn.finish is Finish.STOP}
    assert last == policy.end_ids
    for turn in turns:
        assert policy.end_ids.isdisjoint(turn.completion_ids[:-1])


def write_model(folder, listed):
    """Write what `load_chat` reads of a model, and its end tokens."""
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    return hub_model(folder)


@pytest.mark.parametrize(("listed", "more"), [([5, 6], {5, 6}), (5, {5}), (None, set())])
def test_generation_config_is_read(tmp_path, listed, more):
    ends = load_chat(write_model(tmp_path, listed)).ends
    assert ends.ids == more | {build_tokenizer().eos_token_id}


@pytest.mark.parametrize("listed", ["5", [5, "x"], -1, 1.5, True])
def test_a_wrong_generation_config_is_named(tmp_path, listed):
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        load_chat(write_model(tmp_path, listed))
