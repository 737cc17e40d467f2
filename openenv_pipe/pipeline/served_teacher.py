"""A teacher on a vLLM server: its logprobs of the tokens that are trained on.

The server reads whole samples and returns the logprob of each of their tokens (`prompt_logprobs`),
so a teacher may be larger than this machine's memory. Its logprobs are those at temperature 1.
"""

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import urldefrag

from pydantic import BaseModel, Field, ValidationError

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError, EngineError, raise_first
from openenv_pipe.models.hub import is_on_this_machine
from openenv_pipe.models.load import load_tokenizer
from openenv_pipe.models.teacher import TeacherPlace, check_teacher, find_teachers
from openenv_pipe.system.http import Access, HttpClient, bearer, fetch_object
from openenv_pipe.system.http_retries import MAX_QUOTED, TransientError, post, repeated
from openenv_pipe.system.untrusted_json import parse_untrusted
from openenv_pipe.system.untrusted_text import quoted
from openenv_pipe.types import Sample

API_KEY = "TEACHER_API_KEY"  # the variable with the server's key, if it needs one
TIMEOUT_S = 120.0  # of one request, which may wait for others in the server's queue
ANSWER_LIMIT_S = 10.0  # of a request before a run
MAX_RETRIES = 2
MAX_CONCURRENT = 32
MAX_BYTES = 256 * 2**20  # of an answer
IDS_AT_ONCE = 2048  # token ids whose text one request compares
Answer = TypeVar("Answer", bound=BaseModel)


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


class _Text(BaseModel):
    prompt: str


class _Token(BaseModel):
    logprob: float


class _Choice(BaseModel):
    prompt_logprobs: list[dict[int, _Token] | None]


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTeacher:
    """One model of a server."""

    key: str  # the configuration key that names it
    environments: tuple[str, ...]  # whose episodes it scores
    url: str  # that of the server, without /v1
    model: str

    async def score(self, samples: Sequence[Sample]) -> None:
        """Set `reference_logprobs` of each sample of its environments that has trained tokens.

        Raises:
            EngineError: the server rejects a sample, or does not answer.
        """
        slots = asyncio.Semaphore(MAX_CONCURRENT)
        async with HttpClient(self.url, _access()) as client:

            async def ask(sample: Sample) -> None:
                async with slots:
                    sample.reference_logprobs = await self._logprobs(client, sample.token_ids)

            try:
                async with asyncio.TaskGroup() as tasks:
                    for sample in samples:
                        if sample.env in self.environments and any(sample.loss_mask):
                            tasks.create_task(ask(sample))
            except BaseExceptionGroup as errors:
                raise_first(errors)

    async def _logprobs(self, client: HttpClient, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token after those before it; 0.0 for the first."""
        body = {
            "model": self.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,  # none beside that of the token itself
        }

        async def attempt() -> Any:
            response = await post(
                client, "/v1/completions", body, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES
            )
            if response.status != 200:
                raise EngineError(
                    f"the teacher at {self.url} answered {response.status} to a sample of "
                    f"{len(token_ids):,} tokens: {quoted(response.content, MAX_QUOTED)}; see its "
                    f"log, or check {API_KEY} if the key was rejected"
                )
            return parse_untrusted(response.content)

        try:
            answer = _Completion.model_validate(await repeated(attempt, MAX_RETRIES))
            _, *rest = answer.choices[0].prompt_logprobs
            pairs = zip(rest, token_ids[1:], strict=True)
            found = [0.0, *((position or {})[token].logprob for position, token in pairs)]
        except TransientError as why:
            raise EngineError(
                f"the teacher at {self.url} gave no answer in {MAX_RETRIES + 1} tries, the last "
                f"time: {why}; check whether it still runs, then resume the run"
            ) from why
        except (ValueError, KeyError) as error:
            raise EngineError(
                f"the teacher at {self.url} did not return a logprob of each token of a sample; "
                f"expected the prompt_logprobs of vLLM's /v1/completions: {quoted(str(error))}"
            ) from error
        if not all(map(math.isfinite, found)):
            raise EngineError(f"the teacher at {self.url} returned logprobs that are not finite")
        return found

    async def compare_vocabulary(self, tokenizer: Any) -> None:
        """Raise ConfigError if the server decodes a token of the policy's to another text."""
        ids = sorted(tokenizer.get_vocab().values())
        parts = [ids[start : start + IDS_AT_ONCE] for start in range(0, len(ids), IDS_AT_ONCE)]
        for part in parts:
            body = {"model": self.model, "tokens": part}
            theirs = await _read(self.key, self.url, "/detokenize", _Text, body)
            ours = tokenizer.decode(part)
            if "".join(theirs.prompt.split()) != "".join(ours.split()):
                raise ConfigError(
                    f"{self.key}={self.url!r} has another vocabulary than the policy: the tokens "
                    f"{part[0]} to {part[-1]} are other texts there; serve a model of the "
                    "policy's family"
                )


def check_teachers(config: RunConfig) -> str:
    """Check the teachers, on this machine or on servers, and return what `check` reports of them.

    Raises:
        ConfigError: one is not there, or has another vocabulary than the policy.
    """
    return "; ".join(
        asyncio.run(_check_served(place)) if place.is_served else check_teacher(place)
        for place in find_teachers(config)
    )


async def _check_served(place: TeacherPlace) -> str:
    teacher, policy = await _find_served(place), place.config.model
    found = f"{teacher.model} at {teacher.url}"
    if not is_on_this_machine(policy):
        return f"{found}; its vocabulary is compared after the policy's download"
    await teacher.compare_vocabulary(load_tokenizer(policy))
    return f"{found}; its vocabulary is the policy's"


async def served_teachers(config: RunConfig, tokenizer: Any) -> list[ServedTeacher]:
    """Return the teachers on servers, once their vocabulary is found to be the policy's.

    Raises:
        ConfigError: a server does not answer, lacks the model, has another vocabulary, or reads too
            few tokens.
    """
    found = [await _find_served(place) for place in find_teachers(config) if place.is_served]
    for teacher in found:
        await teacher.compare_vocabulary(tokenizer)
    return found


async def _find_served(place: TeacherPlace) -> ServedTeacher:
    """Return the server's model that the configuration names. Raises ConfigError."""
    given = f"{place.key}={place.reference!r}"
    address, name = urldefrag(place.reference)
    url = address.rstrip("/").removesuffix("/v1")
    models = (await _read(place.key, url, "/v1/models", _Models)).data
    served = ", ".join(model.id for model in models)
    chosen = [model for model in models if name in ("", model.id)]
    if len(chosen) != 1:
        raise ConfigError(
            f"{given} names {'no' if name else 'more than one'} model of the server, which has "
            f"{served}; name one, such as '{place.key}=\"{address}#{models[0].id}\"'"
        )
    longest, needed = chosen[0].max_model_len, place.max_tokens
    if longest is not None and longest <= needed:
        raise ConfigError(
            f"{given} reads {longest:,} tokens at most, and needs one more than "
            f"env.max_episode_tokens={needed:,}; start the server with a larger --max-model-len"
        )
    return ServedTeacher(
        key=place.key, environments=place.environments, url=url, model=chosen[0].id
    )


async def _read(key: str, url: str, path: str, form: type[Answer], body: Any = None) -> Answer:
    """Return the server's answer to a request before a run. Raises ConfigError."""
    limit_s, server = ANSWER_LIMIT_S, "a vLLM server"
    try:
        return form.model_validate(
            await fetch_object(
                url, path, timeout_s=limit_s, access=_access(), body=body, server=server
            )
        )
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}; if it needs a key, set {API_KEY}") from error
    except ValidationError as error:
        raise ConfigError(
            f"{key}: the answer of {url}{path} is not in vLLM's format: {quoted(str(error))}"
        ) from error


def _access() -> Access:
    return bearer(os.environ.get(API_KEY))
