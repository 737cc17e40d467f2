"""Read what a vLLM server answers, and reject what contradicts the request.

Nothing after this module looks at a server's JSON: what is trained on was checked here. An answer
that a repeated request may improve raises ServerGoneError, every other fault EngineError.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openenv_pipe.errors import EngineError
from openenv_pipe.system.untrusted_text import quoted

NO_LOGPROB = -9999.0  # what the server writes for NaN, minus infinity or a missing value
MAX_ROUNDING = 1e-3  # how far rounding may raise a logprob above 0
QUOTE = 500  # characters of an answer that an error message quotes
FINISHED = ("stop", "length")
INTERRUPTED = ("abort", "error")  # the server gave the request up


class ServerGoneError(Exception):
    """A request got no usable answer, but the same request may succeed.

    The connection broke, the server's engine has died, or the server gave the request up.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One completion."""

    token_ids: list[int]
    logprobs: list[float]
    labels: list[str]  # of the weights that sampled it, in order
    versions: Sequence[int] = ()  # of the policy, which `replica.py` reads from the labels


class _Answer(BaseModel):
    """Base of the answers. Numbers are not read from text, and further keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")
    error: Any = None


class _Entry(_Answer):
    token_id: int
    logprob: Annotated[float, Field(allow_inf_nan=False)]


class _Position(_Entry):
    top_logprobs: list[_Entry] = []


class _Logprobs(_Answer):
    content: list[_Position]


class _Span(_Answer):
    version: str
    start: int
    end: int


class _Choice(_Answer):  # one that the server gave up may have None in each place
    index: int
    finish_reason: str | None
    token_ids: list[int] | None
    logprobs: _Logprobs | None
    weight_versions: list[_Span] | None


class _Completions(_Answer):
    model: str
    prompt_token_ids: list[int] | None = None
    choices: list[_Choice]


class _FirstChoice(_Answer):
    logprobs: _Logprobs


class _NextLogprobs(_Answer):
    choices: Annotated[list[_FirstChoice], Field(min_length=1, max_length=1)]


class _Model(_Answer):
    id: str
    root: str | None = None


class Models(_Answer):
    """The answer of /v1/models."""

    data: list[_Model]


class RpcResult(_Answer):
    problem: str
    holder: str = ""
    silent_s: Annotated[float, Field(ge=0)] = 0.0
    is_new: bool = False


class RpcResults(_Answer):
    """The answer of /collective_rpc for a method of our worker extension."""

    results: Annotated[list[RpcResult], Field(min_length=1)]


class WorldSize(_Answer):
    """The answer of /get_world_size."""

    world_size: Annotated[int, Field(ge=1)]


class Tokenized(_Answer):
    """The answer of /tokenize."""

    tokens: list[int]


class _ModelConfig(_Answer):
    enable_sleep_mode: bool


class _VllmConfig(_Answer):
    model: Annotated[_ModelConfig, Field(alias="model_config")]


class ServerInfo(_Answer):
    """The answer of /server_info."""

    vllm_config: _VllmConfig


Parsed = TypeVar("Parsed", bound=_Answer)


def parse(kind: type[Parsed], content: bytes, where: str) -> Parsed:
    """Read an answer with status 200.

    where: the address, for messages.

    Raises:
        ServerGoneError: it is not complete JSON, or reports an error.
        EngineError: it is JSON of another form.
    """
    try:
        error = _Answer.model_validate_json(content).error
        if error is None:
            return kind.model_validate_json(content)
        raise ServerGoneError(f"{where} answered with an error: {quoted(content, QUOTE)}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        raise ServerGoneError(
            f"{where} answered with something that is not complete JSON: {quoted(content, QUOTE)}"
        )
    path = ".".join(map(str, first["loc"])) or "the answer"
    raise EngineError(
        f"{where} answered with JSON of an unexpected form, at {path}: {first['msg']}; seen "
        f"{quoted(repr(first['input']))}; use the version of vLLM that docs/vllm.md names"
    )


def read_completions(
    content: bytes,
    where: str,
    *,
    model: str,
    prompt: Sequence[int],
    sampling: Mapping[str, Any],
    vocabulary_size: int | None = None,
) -> list[Sampled]:
    """Return the completions of one request, in the order of their numbers.

    model, prompt, sampling: what was asked for; sampling has `max_tokens`, and `n` if not 1.
    vocabulary_size: token ids are below it; None: any are accepted.

    Raises ServerGoneError, EngineError: see `parse`; also if an answer is not what was asked for.
    """
    answer = parse(_Completions, content, where)
    if answer.model != model:
        raise EngineError(
            f"{where} answered for model {quoted(answer.model)}, expected {model!r}, which the "
            "request named"
        )
    if answer.prompt_token_ids is not None and answer.prompt_token_ids != list(prompt):
        raise EngineError(
            f"{where} answered for a prompt of {len(answer.prompt_token_ids)} token ids that is "
            f"not the one of {len(prompt)} ids that was sent"
        )
    count = sampling.get("n", 1)
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    if (numbers := [choice.index for choice in choices]) != list(range(count)):
        raise EngineError(
            f"{where} returned completions with the indices {quoted(str(numbers))}, expected 0 to "
            f"{count - 1}, one of each"
        )
    for choice in choices:
        if choice.finish_reason in INTERRUPTED:
            raise ServerGoneError(
                f"{where} ended a completion with finish_reason {choice.finish_reason}"
            )
    return [_sampled(choice, where, sampling["max_tokens"], vocabulary_size) for choice in choices]


def read_next_logprobs(content: bytes, where: str, wanted: Sequence[int]) -> list[float]:
    """Return the logprobs of the `wanted` ids at the first position of a completion.

    A logprob is NaN where the server has none.

    Raises ServerGoneError, EngineError: see `parse`; also if an id is missing.
    """
    (choice,) = parse(_NextLogprobs, content, where).choices
    if len(choice.logprobs.content) != 1:
        raise EngineError(
            f"{where} returned logprobs of {len(choice.logprobs.content)} tokens, expected 1"
        )
    entries = choice.logprobs.content[0].top_logprobs
    found = {entry.token_id: entry.logprob for entry in entries}
    if missing := [id for id in wanted if id not in found]:
        raise EngineError(f"{where} returned no logprob of token {missing[0]}, which was asked for")
    return [found[id] if found[id] > NO_LOGPROB else math.nan for id in wanted]


def _sampled(choice: _Choice, where: str, max_tokens: int, vocabulary_size: int | None) -> Sampled:
    """Return a completion. Raises EngineError if it contradicts its request."""
    ids, spans = choice.token_ids or [], choice.weight_versions or []
    entries = choice.logprobs.content if choice.logprobs is not None else []
    problem = (
        _problem_of_ids(choice.finish_reason, ids, max_tokens, vocabulary_size)
        or _problem_of_logprobs(ids, entries)
        or _problem_of_spans(spans, len(ids))
    )
    if problem:
        raise EngineError(f"{where} returned a completion that cannot be used: {problem}")
    return Sampled(
        token_ids=ids,
        logprobs=[entry.logprob for entry in entries],
        labels=[span.version for span in spans],
    )


def _problem_of_ids(
    finish: str | None, ids: Sequence[int], max_tokens: int, vocabulary_size: int | None
) -> str | None:
    if finish not in FINISHED:
        return f"it ended with finish_reason {finish!r:.80}, expected {' or '.join(FINISHED)}"
    if not 1 <= len(ids) <= max_tokens:
        return f"it has {len(ids)} tokens, expected 1 to {max_tokens}"
    if finish == "length" and len(ids) < max_tokens:
        return (
            f"it was cut after {len(ids)} of {max_tokens} tokens, as by a server whose "
            "--max-model-len is smaller than env.max_episode_tokens"
        )
    outside = [id for id in ids if id < 0 or (vocabulary_size and id >= vocabulary_size)]
    if outside:
        return f"token {outside[0]} is not in the vocabulary of {vocabulary_size} tokens"
    return None


def _problem_of_logprobs(ids: Sequence[int], entries: Sequence[_Position]) -> str | None:
    if len(entries) != len(ids):
        return f"it has {len(ids)} tokens and {len(entries)} logprobs"
    for token_id, entry in zip(ids, entries, strict=True):
        if token_id != entry.token_id:
            return f"token {token_id} was sampled, and the logprob is that of {entry.token_id}"
        if not NO_LOGPROB < entry.logprob <= MAX_ROUNDING:
            return (
                f"the logprob of token {token_id} is {entry.logprob:g}, expected more than "
                f"{NO_LOGPROB:g} and at most 0"
            )
    return None


def _problem_of_spans(spans: Sequence[_Span], num_tokens: int) -> str | None:
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    if not spans or [0, *ends] != [*starts, num_tokens]:
        return f"its weight versions do not cover its {num_tokens} tokens"
    return None
