"""Recorded episodes in the form of verifiers 0.4 and later: the lines of its `traces.jsonl`."""

import json
from collections.abc import Sequence
from typing import Any

from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.extras.viewer.episodes.listing import FoundEpisode
from openenv_pipe.extras.viewer.episodes.query import TRAIN
from openenv_pipe.models.chat.messages import calls_in_text, split_tools
from openenv_pipe.types import Episode, Message, Status, Tool, Turn

# A message, and the turn whose reply it is; None: the agent did not write it there.
Shown = tuple[dict[str, str], Turn | None]
Messages = list[Shown]
FILE_NAME = "traces.jsonl"
TRACE_VERSION = 1  # of verifiers.v1.trace
STOP_CONDITIONS = {Status.TURN_LIMIT: "max_turns", Status.TOKEN_LIMIT: "max_total_tokens"}
ROLES = ("system", "user", "assistant")  # of messages that need nothing but a content
Row = dict[str, Any]


def messages_of(episode: Episode, *, has_calls: bool = False) -> Messages:
    """Return what the model was shown and wrote, without the tools; it ends with the last reply.

    has_calls: the calls of a message that was shown are JSON in its `calls`; else they are in its
        text, as in a reply.
    """
    found: Messages = []
    for turn in episode.agent_turns:
        shown = split_tools(turn.messages)[1]
        found += [(_plain(each if has_calls else calls_in_text(each)), None) for each in shown]
        found.append(({"role": "assistant", "content": turn.reply}, turn))
    return found


def prompt_lengths_of(episode: Episode) -> dict[int, int]:
    """Return the number of tokens of each turn's whole prompt, by the turn's identity."""
    return dict(zip(map(id, episode.turns), episode.prompt_lengths, strict=True))


def tools_of(episode: Episode) -> list[Tool]:
    return split_tools(episode.turns[0].messages)[0] if episode.turns else []


def _plain(message: Message) -> dict[str, str]:
    """Return a message whose values are texts, which tables need, without its images."""
    values = {str(key): value for key, value in message.items() if key != "images"}
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }


def verifiers_episode(run: str, env: str, model: str, found: FoundEpisode) -> Row:
    """Return an episode with its one trace, a conversation in one line of messages.

    Messages have their tokens if the episode is one sample; a prompt's are those of its last
    message.
    """
    episode, name = found.recorded.episode, f"{run}/{found.place}"
    task = {
        "type": "OpenEnvTask",
        "key": episode.task.id,
        "data": {
            "idx": episode.task.index,
            "id": episode.task.id,
            "seed": episode.task.seed,
            "reset": episode.task.reset,
        },
    }
    problem = episode.error or episode.unscored
    errors = [{"type": str(episode.status), "message": problem}] if problem else []
    nodes, calls = _nodes_and_calls(found, model)
    trace = {
        "version": TRACE_VERSION,
        "id": name,
        "task": task,
        "agent": {"config": {"model": model}},
        "nodes": nodes,
        "calls": calls,
        "rewards": {"reward": {"score": float(episode.reward)} if episode.is_scored else None},
        "metrics": {
            "success": float(episode.success),
            **{key: float(value) for key, value in episode.reward_terms.items()},
        },
        "is_completed": True,
        "ok": episode.is_scored,
        "stop_condition": STOP_CONDITIONS.get(episode.status, str(episode.status)),
        "errors": errors,
        "timing": {"start": 0.0},  # it is not recorded
    }
    return {
        "id": name,
        "env": {"id": env},
        "task": task,
        "group": {"id": found.recorded.group},
        "run": _run(run, found),
        "ok": episode.is_scored,
        "errors": errors,
        "traces": [trace],
    }


def _run(run: str, found: FoundEpisode) -> Row:
    step = found.entry.step
    if found.entry.source != TRAIN or step is None:
        return {"type": "eval", "id": run, "name": found.entry.source}
    versions = [each for turn in found.recorded.episode.turns for each in turn.policy_versions]
    policy = {"start": min(versions), "end": max(versions)} if versions else None
    return {"type": "train", "id": run, "work": {"type": "train", "step": step, "policy": policy}}


def _nodes_and_calls(found: FoundEpisode, model: str) -> tuple[list[Row], list[Row]]:
    """Return the messages, each the parent of the next, and the calls that replies came from."""
    episode = found.recorded.episode
    has_tokens, prompt_length_of = _is_one_sample(found), prompt_lengths_of(episode)
    advantages: Sequence[float | None] = found.recorded.advantages or [None] * len(episode.turns)
    advantage_of = {id(turn): each for turn, each in zip(episode.turns, advantages, strict=False)}
    nodes: list[Row] = []
    calls: list[Row] = []
    for message, turn in messages_of(episode):
        role = message["role"] if message["role"] in ROLES else "user"
        node: Row = {
            "parent": len(nodes) - 1 if nodes else None,
            "message": {"role": role, "content": message["content"]},
            "sampled": turn is not None,
            "timestamp": 0.0,  # it is not recorded
        }
        nodes.append(node)
        if turn is None:
            continue
        if has_tokens:
            _add_tokens(nodes, turn, advantage_of.get(id(turn)))
        usage = {
            "prompt_tokens": prompt_length_of[id(turn)],
            "completion_tokens": turn.num_completion_tokens,
        }
        call = {"node": len(nodes) - 1, "model": model, "finish_reason": str(turn.finish)}
        calls.append({**call, "usage": usage})
    return nodes, calls


def _add_tokens(nodes: list[Row], turn: Turn, advantage: float | None) -> None:
    """Give a reply its tokens, and the message before it those of the prompt."""
    reply = nodes[-1]
    reply |= {"token_ids": turn.completion_ids, "mask": [True] * len(turn.completion_ids)}
    reply["logprobs"] = turn.logprobs
    if advantage is not None:
        reply["advantages"] = [advantage] * len(turn.completion_ids)
    prompt: Row = {"token_ids": turn.prompt_ids, "mask": [False] * len(turn.prompt_ids)}
    if len(nodes) > 1 and not nodes[-2]["sampled"]:
        nodes[-2] |= prompt
    else:  # The reply follows another one, or nothing.
        reply |= {name: [*prompt[name], *reply[name]] for name in prompt}


def _is_one_sample(found: FoundEpisode) -> bool:
    """Whether the tokens of the agent's turns, in a row, are the one sample that is trained on."""
    episode = found.recorded.episode
    if any(turn.usage is not None for turn in episode.turns):
        return False
    samples = episode_samples(found.recorded.group, episode, [0.0] * len(episode.turns))
    row = [token for turn in episode.agent_turns for token in turn.prompt_ids + turn.completion_ids]
    return len(samples) == 1 and samples[0].token_ids == row
