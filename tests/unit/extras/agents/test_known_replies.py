"""The model's own replies are found again in whatever history a program sends."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.extras.agents.known_replies import KnownReplies

# Replies that look alike to a program: by their text, stripped, or by their calls.
TEXTS = st.sampled_from(["yes", " yes", "yes\n", "no", ""])
ARGUMENTS = st.sampled_from(['{"a": 1, "b": 2}', '{"b":2,"a":1}', '{"a": 2}'])
USERS = st.sampled_from(["on", "go", "what?"])
# What clients do to what they got: nothing, strip texts, write arguments in another form.
CLIENTS = st.sampled_from(["as it is", "strips", "reformats"])
TURNS = st.lists(
    st.tuples(TEXTS, st.none() | ARGUMENTS, USERS, st.integers(0, 3)), min_size=1, max_size=8
)


def message_of(text, arguments, number, *, has_ids):
    if arguments is None:
        return {"role": "assistant", "content": text}
    call = {"type": "function", "function": {"name": "poll", "arguments": arguments}}
    if has_ids:
        call["id"] = f"call_{number}_0"
    return {"role": "assistant", "content": text or None, "tool_calls": [call]}


def sent_again(message, client):
    """Return a message as a client sends it in its next call."""
    if client == "strips":
        return {**message, "content": (message["content"] or "").strip()}
    if client == "reformats" and message.get("tool_calls"):
        (call,) = message["tool_calls"]
        function = call["function"]
        arguments = json.dumps(json.loads(function["arguments"]), separators=(",", ":"))
        call = {**call, "function": {**function, "arguments": arguments}}
        return {**message, "tool_calls": [call]}
    return message


class Conversation:
    """A program that calls a model, and the truth about what the model wrote."""

    def __init__(self, client, *, has_ids):
        self.known = KnownReplies()
        self.client = client
        self.has_ids = has_ids
        self.number = 0

    def ask(self, history, text, arguments):
        """Add a reply to a history, and return the new one and the raw text of the reply."""
        raw = f"{text}|{arguments}|"
        message = message_of(text, arguments, self.number, has_ids=self.has_ids)
        self.known.add(history, message, raw, [self.number])
        self.number += 1
        return [*history, sent_again(message, self.client)], raw


@settings(max_examples=300)
@given(turns=TURNS, client=CLIENTS, has_ids=st.booleans())
def test_a_conversation_has_the_replies_that_were_sampled(turns, client, has_ids):
    program = Conversation(client, has_ids=has_ids)
    history, truth = [{"role": "user", "content": "begin"}], {}
    for text, arguments, user, _ in turns:
        index = len(history)
        history, raw = program.ask(history, text, arguments)
        truth[index] = raw, program.number - 1
        history = [*history, {"role": "user", "content": user}]
        found = program.known.find(history)
        assert (found.num_unknown, found.num_ambiguous) == (0, 0)
        assert {n: (reply.text, *reply.ids) for n, reply in found.replies.items()} == truth


@settings(max_examples=300)
@given(turns=TURNS, client=CLIENTS, has_ids=st.booleans())
def test_a_tree_of_conversations_never_has_a_reply_with_another_text(turns, client, has_ids):
    """Retries, calls at once and sub-agents: what could be one of several stays the program's."""
    program = Conversation(client, has_ids=has_ids)
    nodes = [([{"role": "user", "content": "begin"}], {})]
    for text, arguments, user, parent in turns:
        history, truth = nodes[parent % len(nodes)]
        index = len(history)
        history, raw = program.ask(history, text, arguments)
        history, truth = [*history, {"role": "user", "content": user}], {**truth, index: raw}
        nodes.append((history, truth))
    for history, truth in nodes:
        found = program.known.find(history)
        assert found.num_unknown == 0
        assert len(found.replies) + found.num_ambiguous == len(truth)
        assert all(reply.text == truth[index] for index, reply in found.replies.items())


def ask(known, history, text, number=0, calls=()):
    message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    known.add(history, message, f"raw {number}", [number])
    return [*history, message]


USER = {"role": "user", "content": "on"}


def test_a_history_without_its_beginning_is_still_known():
    known = KnownReplies()
    history = ask(known, [{"role": "system", "content": "It is 12:01."}, USER], "yes", 0)
    history = ask(known, [*history, {"role": "user", "content": "again"}], "yes ", 1)
    compacted = [{"role": "system", "content": "It is 12:02."}, *history[1:]]
    found = known.find(compacted)
    assert [found.replies[n].text for n in (2, 4)] == ["raw 0", "raw 1"]


def test_an_edited_reply_is_the_programs_own():
    known = KnownReplies()
    history = ask(known, [USER], "yes")
    found = known.find([USER, {**history[1], "content": "yes, and more"}])
    assert (found.replies, found.num_unknown) == ({}, 1)
    call = {"id": "call_0_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = ask(known, [USER], None, 1, calls=[call])
    edited = {**call, "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = known.find([USER, {**history[1], "tool_calls": [edited]}])
    assert (found.replies, found.num_unknown) == ({}, 1)


def test_what_could_be_one_of_several_is_not_guessed():
    known = KnownReplies()
    ask(known, [USER], "yes", 0)
    ask(known, [USER], " yes", 1)
    assert known.find([USER, {"role": "assistant", "content": " yes"}]).replies[1].text == "raw 1"
    stripped = known.find([USER, {"role": "assistant", "content": "yes"}])
    assert (stripped.replies, stripped.num_ambiguous) == ({}, 1)
