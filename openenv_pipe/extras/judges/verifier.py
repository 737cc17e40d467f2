"""The term `verifier`: an endpoint or a function says what each episode is worth.

A verifier that fails is not a value of 0: the episode has no reward. The answers of an endpoint
are kept in the run folder and are not asked for again; a function is called again.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from openenv_pipe.errors import ConfigError, JudgeError
from openenv_pipe.extras.judges.schema import HttpVerifier, PythonVerifier, VerifierTerm
from openenv_pipe.extras.judges.trajectories import conversation_of
from openenv_pipe.extras.judges.verdicts import Verdicts
from openenv_pipe.rewards.values import (
    GroupTerm,
    NoValue,
    TermSources,
    TermValue,
    Values,
    value_each,
    weighted,
)
from openenv_pipe.runs.paid_answers import FAILED
from openenv_pipe.system.http import Access, HttpClient
from openenv_pipe.system.http_retries import (
    MAX_QUOTED,
    SETTINGS_STATUSES,
    TransientError,
    post,
    repeated,
)
from openenv_pipe.system.python_targets import load_function
from openenv_pipe.system.secrets import is_secret_name
from openenv_pipe.system.untrusted_json import encodable_json, parse_untrusted
from openenv_pipe.system.untrusted_text import quoted
from openenv_pipe.system.user_code import UserCode, UserCodeError
from openenv_pipe.system.user_numbers import read_number
from openenv_pipe.types import Episode, Group

FOLDER = "verifier"  # in the folder of a judge's answers
MAX_BYTES = 2**20  # of an answer
MAX_NUMBERS, MAX_NAME_LENGTH = 64, 100  # of an answer; each number becomes a metric


class FailedVerifierError(Exception):
    """The verifier has no usable answer about an episode; the message says why."""


class VerifierSource(Protocol):
    """Where the answers come from. `reject` and `settle` are those of `Verdicts`."""

    async def ask(self, episode: Episode) -> Any:
        """Return the answer about an episode.

        Raises FailedVerifierError if there is none, and ConfigError if there will be none for any.
        """
        ...

    def reject(self, episode: Episode) -> None: ...

    def settle(self, groups: Collection[str], *, goes_on: bool) -> None: ...


class Verifier:
    def __init__(self, name: str, term: VerifierTerm, source: VerifierSource) -> None:
        self._name = name
        self._term = term
        self._source = source
        self._slots = asyncio.Semaphore(term.max_concurrent)

    async def values(self, group: Group) -> Values:
        return await value_each(group, self._value)

    async def _value(self, episode: Episode) -> TermValue | NoValue:
        try:
            async with self._slots:
                answer = await self._source.ask(episode)
        except FailedVerifierError as failure:
            return NoValue(why=str(failure))
        try:
            return self._read(answer)
        except FailedVerifierError as failure:
            self._source.reject(episode)
            return NoValue(why=str(failure))

    def _read(self, answer: Any) -> TermValue | NoValue:
        if answer is None:
            return NoValue(why="the verifier answered with null")
        if not isinstance(answer, Mapping):
            if self._term.weights is not None or self._term.gates:
                raise FailedVerifierError(f"{_shown(answer)} has no names, which the weights need")
            value = _number(answer)
            return TermValue(credits=[value], total=value)
        if not answer or len(answer) > MAX_NUMBERS:
            raise FailedVerifierError(f"{len(answer)} numbers, expected 1 to {MAX_NUMBERS}")
        parts = {_name(name): _number(number) for name, number in answer.items()}
        weights, gates = self._term.weights, self._term.gates
        if weights is None:
            weights = {name: 1.0 for name in parts if name not in gates}
        if missing := [name for name in (*weights, *gates) if name not in parts]:
            raise FailedVerifierError(f"{_shown(answer)} has no {', '.join(missing)}")
        value = _number(weighted(parts, weights, gates))
        return TermValue(credits=[value], total=value, parts=parts)

    def check(self, num_played: int, reasons: Sequence[str]) -> None:
        """Raise JudgeError if the failures are a larger share than `max_failed_share`.

        reasons: why episodes of a step or an evaluation have no value.
        """
        limit = self._term.max_failed_share
        if len(reasons) > limit * num_played:
            raise JudgeError(
                f"the verifier gave no value for {len(reasons)} of {num_played} episodes, more "
                f"than reward.terms.{self._name}.max_failed_share={limit:g}; the last reason: "
                f"{reasons[-1]}"
            )

    def settle(self, groups: Collection[str], *, goes_on: bool) -> None:
        self._source.settle(groups, goes_on=goes_on)


class HttpSource:
    """An endpoint. Equal episodes are sent once, also those of a run that was resumed."""

    def __init__(
        self,
        name: str,
        term: VerifierTerm,
        source: HttpVerifier,
        client: HttpClient,
        verdicts: Verdicts,
    ) -> None:
        self._key = f"reward.terms.{name}"
        self._timeout_s = term.timeout_s
        self._config = source
        self._client = client
        self._verdicts = verdicts
        # Answers are kept by this address. A service may choose what it measures by a header; a
        # secret is left out, because answers outlive a key that is renewed.
        plain = {key: each for key, each in source.headers.items() if not is_secret_name(key)}
        self._address = f"{source.url}#{json.dumps([name, plain], sort_keys=True)}"

    async def ask(self, episode: Episode) -> Any:
        body = json_of(episode)
        kept = await self._verdicts.answer(self._address, body, partial(self._answer, body))
        if FAILED in kept:
            raise FailedVerifierError(str(kept[FAILED]))
        return kept["answer"]

    def reject(self, episode: Episode) -> None:
        self._verdicts.reject(self._address, json_of(episode))

    def settle(self, groups: Collection[str], *, goes_on: bool) -> None:
        self._verdicts.settle(groups, goes_on=goes_on)

    async def _answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        retries = self._config.max_retries
        try:
            return {"answer": await repeated(partial(self._post, body), retries)}
        except TransientError as why:
            failure = f"{self._config.url} gave no answer in {retries + 1} tries: {why}"
        except FailedVerifierError as why:
            failure = str(why)
        return {FAILED: failure}

    async def _post(self, body: Mapping[str, Any]) -> Any:
        response = await post(
            self._client,
            "",
            body,
            timeout_s=self._timeout_s,
            key=f"{self._key}.timeout_s",
            max_bytes=MAX_BYTES + 1,
        )
        url, content = self._config.url, response.content
        if response.status in SETTINGS_STATUSES:
            raise ConfigError(
                f"{url} answered {response.status}: {quoted(content, MAX_QUOTED)}; see "
                f"{self._key}.source.url and headers"
            )
        if response.status != 200:
            raise FailedVerifierError(f"status {response.status}, {quoted(content, MAX_QUOTED)}")
        if len(content) > MAX_BYTES:
            raise FailedVerifierError(f"an answer of more than {MAX_BYTES} bytes")
        try:
            return parse_untrusted(content)
        except ValueError as error:
            told = quoted(content, MAX_QUOTED)
            raise TransientError(f"an answer that is not JSON: {told}") from error


class FunctionSource:
    """A function of the user, called with an `openenv_pipe.types.Episode`."""

    def __init__(self, name: str, term: VerifierTerm, source: PythonVerifier) -> None:
        key = f"reward.terms.{name}.source"
        self._function = load_function(key, source, 1, may_be_async=True)
        self._code = UserCode(f"{key}.target={source.target!r}", limit_s=term.timeout_s)
        self._options = source.options

    async def ask(self, episode: Episode) -> Any:
        try:
            return await self._code.call(self._function, episode, **self._options)
        except UserCodeError as error:
            raise FailedVerifierError(str(error)) from error

    def reject(self, episode: Episode) -> None:
        """Do nothing: the function of a resumed run is called again."""

    def settle(self, groups: Collection[str], *, goes_on: bool) -> None:
        """Do nothing: the function of a resumed run is called again."""


def opened_verifier(name: str, term: VerifierTerm, sources: TermSources) -> GroupTerm | None:
    """Return the verifier that `open_verifier` has opened; None if there is none.

    Raises ConfigError if its function cannot be used.
    """
    if isinstance(term.source, PythonVerifier):
        FunctionSource(name, term, term.source)
    return sources.opened.get(name)


@asynccontextmanager
async def open_verifier(
    name: str, term: VerifierTerm, folder: Path, *others: Path
) -> AsyncIterator[Verifier]:
    """Open the verifier of a term.

    folder: of a judge's answers, where those of verifiers are kept too.
    others: such folders of other runs, which are read only.
    """
    if isinstance(term.source, PythonVerifier):
        yield Verifier(name, term, FunctionSource(name, term, term.source))
        return
    async with HttpClient(term.source.url, Access(headers=term.source.headers)) as client:
        verdicts = Verdicts(folder / FOLDER, tuple(each / FOLDER for each in others))
        yield Verifier(name, term, HttpSource(name, term, term.source, client, verdicts))


def json_of(episode: Episode) -> dict[str, Any]:
    """Return an episode as an endpoint gets it: its task, its messages, and what was done."""
    task = episode.task
    body = {
        "task": {
            "id": task.id,
            "split": task.split,
            "index": task.index,
            "seed": task.seed,
            "reset": dict(task.reset),
        },
        "status": episode.status.value,
        "success": episode.success,
        "messages": conversation_of(episode),
        "turns": [
            {
                "reply": turn.reply,
                "unusable": turn.unusable,
                "steps": [
                    {
                        "action": dict(step.action),
                        "observation": dict(step.observation),
                        "reward": step.reward,
                    }
                    for step in turn.steps
                ],
            }
            for turn in episode.turns
        ],
    }
    (encodable,) = encodable_json([body])
    return encodable


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise FailedVerifierError(
            f"a number is named {_shown(name)}, expected 1 to {MAX_NAME_LENGTH} characters"
        )
    return name


def _number(value: Any) -> float:
    try:
        return read_number(value)
    except ValueError as error:
        raise FailedVerifierError(quoted(str(error), MAX_QUOTED)) from None


def _shown(value: Any) -> str:
    return quoted(repr(value), MAX_QUOTED)
