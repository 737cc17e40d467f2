"""Let an agent play one episode over HTTP, and make turns of its model calls and steps."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from openenv_pipe.algorithms.call_graph import assign_roles, link_turns
from openenv_pipe.environments.adapters.base import Adapter
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.client.session import EpisodeSession, Session
from openenv_pipe.extras.agents.calls import Call, ModelCalls
from openenv_pipe.extras.agents.gateway import Gateway, Rollout
from openenv_pipe.extras.agents.hosted_calls import HostedCalls
from openenv_pipe.extras.agents.schema import CallingAgentConfig
from openenv_pipe.extras.agents.steps import EnvironmentSteps
from openenv_pipe.models.chat.messages import with_tools
from openenv_pipe.rollout.context import EpisodeSpec, PlayContext
from openenv_pipe.rollout.episode import Player
from openenv_pipe.types import PREVIOUS, Message, Opening, Status, Turn, TurnRole, Usage

MAX_REASONS = 8  # for which calls were rejected


def build_turns(calls: Sequence[Call], steps: EnvironmentSteps) -> list[Turn]:
    """Return a turn for each call, linked to the call that it continues.

    A step belongs to the last call that was answered before it, or to the first call if there is
    none. A call whose answer nobody received is a retry.
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
            turn.parent = PREVIOUS  # as in the pipeline's loop
    for number, step, time_s in steps.taken if turns else ():
        turn = turns[max(0, number)]
        turn.steps.append(step)
        turn.times_s.append(time_s)
    return turns


def _new_messages(call: Call, calls: Sequence[Call], parent: int | None) -> list[Message]:
    """Return the messages after the reply of the parent call; without a parent, all of them."""
    if parent is None:
        return with_tools(call.messages, call.request.tools)
    return call.messages[len(calls[parent].messages) + 1 :]


def _new_tokens(usage: Usage, calls: Sequence[Call], parent: int | None) -> Usage:
    """Return the usage without the prompt tokens that the parent call has counted."""
    before = None if parent is None else calls[parent].usage
    if before is None:
        return usage
    counted = before.num_prompt_tokens + before.num_completion_tokens
    return replace(usage, num_prompt_tokens=max(0, usage.num_prompt_tokens - counted))


class AgentPlayer(Player, ABC):
    """Plays one episode with an agent that calls the model and takes steps over HTTP."""

    def __init__(
        self,
        context: PlayContext,
        adapter: Adapter,
        spec: EpisodeSpec,
        *,
        gateway: Gateway,
        config: CallingAgentConfig,
    ) -> None:
        super().__init__(context, adapter, spec)
        self._gateway = gateway
        self._limits = config

    async def _converse(
        self, session: EpisodeSession, first: StepResult, opening: Opening
    ) -> Status:
        context, config = self._context, self._limits
        is_hosted = context.engine.capabilities.takes == "messages"
        calls = (HostedCalls if is_hosted else ModelCalls)(context, self._spec, config)
        steps = EnvironmentSteps(
            cast(Session, session),  # no seat: agents play no games
            context.env,
            first,
            opening=opening,
            adapter=self._adapter,
            last_call=lambda: len(calls.answered) - 1,
        )
        with self._gateway.rollout(calls, steps, max_calls=config.max_calls) as rollout:
            try:
                return await self._run(rollout, opening)
            finally:
                calls.cancel()

    @abstractmethod
    async def _run(self, rollout: Rollout, opening: Opening) -> Status:
        """Wait for the agent's end, and fill in the episode. Return how it ended."""

    async def _conclude(self, rollout: Rollout) -> None:
        """Answer no further call and no further step, and build the episode's turns.

        Raises SessionError if the environment's session has failed, else the engine's error.
        """
        calls, steps = rollout.calls, rollout.steps
        await steps.end()
        await calls.end()
        if calls.failure is not None:
            raise calls.failure
        self._episode.turns = build_turns(calls.answered, steps)
        self._episode.notes = calls.notes + _noted(calls.rejections)
        if steps.failure is not None:
            raise steps.failure

    def _status(self, rollout: Rollout) -> Status:
        """Return how an agent that ended by itself has ended."""
        episode, calls, steps = self._episode, rollout.calls, rollout.steps
        if rollout.fatal_findings:
            episode.error = f"the calls cannot be used: {rollout.fatal_findings[0]}"
            return Status.ERROR
        if steps.is_done:
            return Status.DONE
        if calls.is_too_long:
            return Status.TOKEN_LIMIT
        if not calls.answered:
            rejected = "; ".join(_noted(calls.rejections))
            without = f"an answered call: {rejected}" if rejected else "a call of the model"
            episode.error = f"the program ended without {without}"
            return Status.NO_CALLS
        if rollout.num_rejected_calls or steps.is_used_up:
            return Status.TURN_LIMIT
        return Status.ANSWERED

    def _task(self, opening: Opening) -> dict[str, Any]:
        task = self._episode.task
        return {
            "id": task.id,
            "observation": self._episode.first_observation,
            "messages": [
                {"role": message["role"], "content": message["content"]}
                for message in opening.messages
            ],
            "tools": list(opening.tools),
            "max_steps": self._context.env.max_turns,
        }


def _noted(rejections: Sequence[str]) -> list[str]:
    """Say how many calls got an error instead of an answer, for each reason."""
    return [
        f"{count} {'call was' if count == 1 else 'calls were'} rejected with {reason}"
        for reason, count in Counter(rejections).items()
    ][:MAX_REASONS]
