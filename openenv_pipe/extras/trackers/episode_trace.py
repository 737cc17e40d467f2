"""One episode as a trace: an agent, its model calls and its tool calls, as spans.

The names of attributes are those of OpenTelemetry's conventions for generative AI, which are still
under development; all of them are in this file. Rewards have names of our own, under
`openenv_pipe.`, and are also events of the conventions for evaluations.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from openenv_pipe.system.secrets import redact
from openenv_pipe.system.untrusted_text import shortened, visible
from openenv_pipe.types import Episode, Message, Step, Turn

MAX_TEXT_LENGTH = 20_000  # characters of one message
OWN = "openenv_pipe."
SCRIPTED = f"{OWN}scripted"  # the provider of scripted policies
Attributes = dict[str, str | int | float | bool | list[str] | list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A span before it is one of OpenTelemetry's. The first one of a trace has no parent."""

    id: int
    parent: int | None
    name: str
    is_call: bool  # of something outside: the model
    start_ns: int  # Unix time
    end_ns: int
    attributes: Attributes
    events: list[tuple[str, Attributes]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What all traces of a step or of an evaluation have in common."""

    run: str
    environment: str  # the first of the run
    provider: str  # of the model
    model: str
    step: int | None  # of GRPO; None: an evaluation of a model that no step has trained
    evaluation: str | None = None  # its label; None: the episodes are of training
    now_s: float  # the time of episodes whose times are unknown

    @property
    def session(self) -> str:
        """The name under which tools gather these traces."""
        if self.evaluation is None:
            return f"{self.run}/{self.step}"
        return f"{self.run}/eval/{_text(self.evaluation)}/{self.step or 0}"


def provider_and_model(config: Mapping[str, Any]) -> tuple[str, str]:
    engine, model = config["engine"], config["model"]
    if engine["type"] == "openai":
        return "openai", str(engine["model"])
    return f"{OWN}{engine['type']}", str(model.get("path") or model["type"])


def trace_id(origin: Origin, group: str, episode: Episode) -> int:
    """Return a trace's id: the same if the episode is sent again, as after a resume."""
    label = () if origin.evaluation is None else ("eval", origin.evaluation)
    return _digest(128, origin.run, *label, origin.step, group, episode.member, episode.seed)


def episode_spans(origin: Origin, group: str, episode: Episode) -> list[Span]:
    """Return the spans of an episode, that of the agent first."""
    trace = trace_id(origin, group, episode)
    start_ns = _ns(episode.started_s or origin.now_s)
    root = Span(
        id=_digest(64, trace),
        parent=None,
        name=f"invoke_agent {_environment(origin, episode)}",
        is_call=False,
        start_ns=start_ns,
        end_ns=start_ns + _ns(episode.duration_s if episode.started_s else 0.0),
        attributes=_agent_attributes(origin, group, episode),
        events=list(_evaluations(episode)),
        error=_text(episode.error) if episode.error else None,
    )
    spans = [root]
    for number, (turn, length) in enumerate(
        zip(episode.turns, episode.prompt_lengths, strict=True)
    ):
        spans.append(_model_call(origin, root, number, turn, prompt_length=length))
        spans += _tool_calls(origin, root, number, turn)
    return spans


def _agent_attributes(origin: Origin, group: str, episode: Episode) -> Attributes:
    last = episode.turns[-1:]
    own: Attributes = {
        "run": origin.run,
        "group": _text(group),
        "member": episode.member,
        "task.id": _text(episode.task.id),
        "task.split": episode.task.split,
        "status": str(episode.status),
        "success": episode.success,
        "is_scored": episode.is_scored,
        "num_turns": len(episode.turns),
    }
    own |= {f"reward.{_text(name)}": float(each) for name, each in episode.reward_terms.items()}
    if episode.is_scored:
        own["reward"] = float(episode.reward)
    if origin.step is not None:
        own["step"] = origin.step
    if origin.evaluation is not None:
        own["evaluation"] = _text(origin.evaluation)
    if episode.unscored:
        own["unscored"] = _text(episode.unscored)
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": _environment(origin, episode),
        "gen_ai.provider.name": origin.provider,
        "gen_ai.request.model": origin.model,
        "gen_ai.conversation.id": f"{origin.session}/{_text(group)}/{episode.member}",
        "gen_ai.usage.input_tokens": sum(episode.prompt_lengths),
        "gen_ai.usage.output_tokens": episode.num_completion_tokens,
        "gen_ai.input.messages": _messages(
            [{"role": "user", "content": json.dumps(episode.first_observation, ensure_ascii=False)}]
        ),
        "gen_ai.output.messages": _messages([_reply(turn) for turn in last]),
        "session.id": origin.session,
        **{OWN + name: value for name, value in own.items()},
    }


def _environment(origin: Origin, episode: Episode) -> str:
    """Return the name of the episode's environment, one of several or the run's only one."""
    return _text(episode.task.env or origin.environment)


def scores_of(episode: Episode) -> list[tuple[str, float, str | None]]:
    """Return the name of each score of an episode, its value, and a judge's words if it has some.

    An episode without a reward has none.
    """
    if not episode.is_scored:
        return []
    values = {"reward": episode.reward, "success": float(episode.success), **episode.reward_terms}
    words = {name: _text(each.explanation) for name, each in episode.judgements.items()}
    return [(_text(name), float(value), words.get(name)) for name, value in values.items()]


def _evaluations(episode: Episode) -> Iterator[tuple[str, Attributes]]:
    """Yield the episode's scores, as events of the conventions."""
    for name, value, words in scores_of(episode):
        attributes: Attributes = {
            "gen_ai.evaluation.name": name,
            "gen_ai.evaluation.score.value": value,
        }
        if words is not None:
            attributes["gen_ai.evaluation.explanation"] = words
        yield "gen_ai.evaluation.result", attributes


def _model_call(origin: Origin, root: Span, number: int, turn: Turn, *, prompt_length: int) -> Span:
    asked_s, replied_s, *_ = turn.times_s or (origin.now_s, origin.now_s)
    return Span(
        id=_digest(64, root.id, number),
        parent=root.id,
        name=f"chat {_text(origin.model)}",
        is_call=True,
        start_ns=_ns(asked_s),
        end_ns=_ns(replied_s),
        attributes={
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": origin.provider,
            "gen_ai.request.model": origin.model,
            "gen_ai.input.messages": _messages(turn.messages),
            "gen_ai.output.messages": _messages([_reply(turn)]),
            "gen_ai.usage.input_tokens": prompt_length,
            "gen_ai.usage.output_tokens": turn.num_completion_tokens,
            "gen_ai.response.finish_reasons": [str(turn.finish)],
            OWN + "policy_versions": list(turn.policy_versions),
            OWN + "role": str(turn.role),
        },
        error=_text(turn.unusable) if turn.unusable else None,
    )


def _tool_calls(origin: Origin, root: Span, number: int, turn: Turn) -> Iterator[Span]:
    times = turn.times_s[1:] or [origin.now_s] * (len(turn.steps) + 1)
    for index, step in enumerate(turn.steps):
        yield Span(
            id=_digest(64, root.id, number, index),
            parent=root.id,
            name=f"execute_tool {_tool_name(step)}",
            is_call=False,
            start_ns=_ns(times[index]),
            end_ns=_ns(times[index + 1]),
            attributes={
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": _tool_name(step),
                "gen_ai.tool.call.arguments": _json(step.action),
                "gen_ai.tool.call.result": _json(step.observation),
                OWN + "reward": float(step.reward),
            },
        )


def _tool_name(step: Step) -> str:
    """Return the name of the tool that was called; `step` for an action of another kind."""
    name = step.action.get("tool_name")
    return _text(name) if isinstance(name, str) and name else "step"


def _reply(turn: Turn) -> Message:
    return {"role": "assistant", "content": turn.reply, "finish_reason": str(turn.finish)}


def _messages(messages: list[Message]) -> str:
    return json.dumps(
        [
            {
                **{key: _text(str(value)) for key, value in message.items() if key != "content"},
                "parts": [{"type": "text", "content": _text(str(message.get("content", "")))}],
            }
            for message in messages
        ]
    )


def _json(value: Any) -> str:
    return _text(json.dumps(value, ensure_ascii=False))


def _text(text: str) -> str:
    """Return a text of any origin without secrets, shortened, and fit for UTF-8."""
    return visible(shortened(redact(text), MAX_TEXT_LENGTH))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _digest(num_bits: int, *parts: object) -> int:
    digest = hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).digest()
    return int.from_bytes(digest[: num_bits // 8]) or 1  # 0 is not an id
