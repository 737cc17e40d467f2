"""From a program's calls and steps to the turns of its episode."""

from collections.abc import Sequence
from dataclasses import replace

from openenv_pipe.algorithms.call_graph import assign_roles, link_turns
from openenv_pipe.extras.agents.calls import Call
from openenv_pipe.extras.agents.steps import EnvironmentSteps
from openenv_pipe.models.chat.messages import with_tools
from openenv_pipe.types import PREVIOUS, Message, Turn, TurnRole, Usage


def build_turns(calls: Sequence[Call], steps: EnvironmentSteps) -> list[Turn]:
    """Return a turn for each call, linked to the call that it continues.

    A step belongs to the last call that was answered before it, and one before the first call
    belongs to that. A call whose answer nobody received is a retry.
    """
    turns = [
        Turn(
            prompt_ids=call.prompt_ids,
            completion_ids=call.completion.token_ids,
            logprobs=call.completion.logprobs,
            finish=call.completion.finish,
            policy_versions=call.completion.policy_versions,
            reply=call.reply,
            unusable=steps.rejected.get(index),
            times_s=list(call.times_s),
        )
        for index, call in enumerate(calls)
    ]
    link_turns(turns)
    assign_roles(turns, [bool(call.request.tools) for call in calls])
    for index, (turn, call) in enumerate(zip(turns, calls, strict=True)):
        turn.messages = _new_messages(call, calls, turn.parent)
        if call.usage is not None:
            turn.usage = _new_tokens(call.usage, calls, turn.parent)
            turn.prompt_ids, turn.completion_ids = [], []
        if call.connection.is_lost:
            turn.role = TurnRole.RETRY
        if turn.parent == (index - 1 if index else None):
            turn.parent = PREVIOUS  # as of the pipeline's loop
    for number, step, time_s in steps.taken if turns else ():
        turn = turns[max(0, number)]
        turn.steps.append(step)
        turn.times_s.append(time_s)
    return turns


def _new_messages(call: Call, calls: Sequence[Call], parent: int | None) -> list[Message]:
    """Return the messages that follow the reply of the call before; of a first one, all of them."""
    if parent is None:
        return with_tools(call.messages, call.request.tools)
    return call.messages[len(calls[parent].messages) + 1 :]


def _new_tokens(usage: Usage, calls: Sequence[Call], parent: int | None) -> Usage:
    """Return the usage without the prompt tokens that the call before has counted."""
    before = None if parent is None else calls[parent].usage
    if before is None:
        return usage
    counted = before.num_prompt_tokens + before.num_completion_tokens
    return replace(usage, num_prompt_tokens=max(0, usage.num_prompt_tokens - counted))
