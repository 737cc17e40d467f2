"""The judge: asks a model for verdicts, reads and keeps its answers, and minds the budget.

An unusable answer does not count as a score of 0: the episodes in question have no reward.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from openenv_pipe.config.schema import JudgeConfig
from openenv_pipe.engines.base import estimate_tokens
from openenv_pipe.engines.openai import ChatClient
from openenv_pipe.errors import ConfigError, EngineError, JudgeError, RequestRejectedError
from openenv_pipe.extras.judges.schema import OpenAIJudgeConfig, VerdictsBlock, VllmJudgeConfig
from openenv_pipe.extras.judges.verdicts import Verdicts
from openenv_pipe.extras.judges.vllm_server import VllmJudgeClient
from openenv_pipe.models.replies.formats import THINK
from openenv_pipe.models.replies.values import START
from openenv_pipe.runs.paid_answers import FAILED, Price, price_of
from openenv_pipe.system.http_retries import SETTINGS_STATUSES
from openenv_pipe.types import Message

MAX_QUOTED = 2000  # characters of an unusable answer that the judge is shown again
_log = logging.getLogger(__name__)
Value = TypeVar("Value")
MAX_STARTS = 64  # opening braces that begin no complete object; each costs a pass over the text
_START = re.compile(START)


class Spending:
    """Adds up what answers cost. Requests in flight may exceed the limits of tokens and cost."""

    def __init__(self, config: VerdictsBlock, paid: Iterable[Mapping[str, Any]] = ()) -> None:
        self._config = config
        self._num_calls = 0
        self._num_tokens = 0
        self._cost = 0.0
        for answer in paid:
            self._num_calls += 1
            self.add(self.price(answer))

    def begin_call(self) -> None:
        self._num_calls += 1

    def add(self, price: Price) -> None:
        self._num_tokens += price.num_tokens
        self._cost += price.cost

    def price(self, answer: Mapping[str, Any]) -> Price:
        """Return what an answer cost, by the usage that the endpoint reports; without it 0."""
        config = self._config
        return price_of(
            answer,
            config.price_per_million_prompt_tokens,
            config.price_per_million_answer_tokens,
        )

    def exceeded(self) -> str | None:
        """Return the limit that is reached, as `judge.max_calls=8`, or None."""
        spent = {
            "max_calls": self._num_calls,
            "max_tokens": self._num_tokens,
            "max_cost": self._cost,
        }
        for key, amount in spent.items():
            limit = getattr(self._config, key)
            if limit is not None and amount >= limit:
                return f"judge.{key}={limit:g}"
        return None


class UnusableAnswerError(ValueError):
    """An answer that cannot be read; the message tells the judge why."""


class NoVerdictError(Exception):
    """The judge gave no usable answer. The episodes that it was asked about have no reward."""


class BudgetSpentError(Exception):
    """The judge may not be asked any more, and the run goes on without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(Generic[Value]):
    """What was read from an answer, and what the answer and its repairs cost."""

    value: Value
    num_calls: int
    num_tokens: int
    cost: float


class Judge:
    """Asks one endpoint. Equal requests are sent once, also those made at the same time."""

    def __init__(
        self,
        config: OpenAIJudgeConfig | VllmJudgeConfig,
        client: ChatClient | VllmJudgeClient,
        verdicts: Verdicts,
        *,
        repeat: int = 0,
    ) -> None:
        self._config = config
        self._client = client
        self._verdicts = verdicts
        # Answers are kept by this address, and so those of a repetition apart from the others.
        self._address = client.url + (f"#{repeat}" if repeat else "")
        self._max_tokens_key = (
            config.max_tokens_key if isinstance(config, OpenAIJudgeConfig) else "max_tokens"
        )
        self._spending = Spending(config, verdicts.answers())
        self._num_in_flight = 0
        self._has_told = False

    async def ask(
        self, messages: Sequence[Message], schema: Mapping[str, Any], read: Callable[[str], Value]
    ) -> Verdict[Value]:
        """Ask until `read` accepts the answer, which it may reject with UnusableAnswerError.

        Raises NoVerdictError without such an answer, and ConfigError if the endpoint rejects every
        request. When the budget is spent, raises BudgetSpentError if the run goes on without the
        judge (`judge.when_spent=continue`), else JudgeError.
        """
        asked = list(messages)
        bodies: list[dict[str, Any]] = []
        prices: list[Price] = []
        for _ in range(self._config.max_repairs + 1):
            bodies.append(self._body(asked, schema))
            answer = await self._answer(bodies[-1])
            prices.append(self._spending.price(answer))
            text = _text(answer)
            try:
                value = read(text)
            except UnusableAnswerError as error:
                why = str(error)
                again = f"This answer cannot be used: {why}. Answer again."
                asked += [
                    {"role": "assistant", "content": text[:MAX_QUOTED]},
                    {"role": "user", "content": again},
                ]
                continue
            return Verdict(
                value=value,
                num_calls=len(prices),
                num_tokens=sum(price.num_tokens for price in prices),
                cost=sum(price.cost for price in prices),
            )
        for body in bodies:
            self._verdicts.reject(self._address, body)
        raise NoVerdictError(f"{why}; its last answer was {text[:MAX_QUOTED]!r}")

    @property
    def max_failed_share(self) -> float:
        """The largest share of a rollout batch's episodes that may have no verdict."""
        return self._config.max_failed_share

    def settle(self, groups: Collection[str], *, goes_on: bool) -> None:
        self._verdicts.settle(groups, goes_on=goes_on)

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._verdicts.answer(self._address, body, partial(self._new_answer, body))
        if FAILED in answer:
            raise NoVerdictError(str(answer[FAILED]))
        return answer

    async def _new_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._reject_if_spent()
        self._spending.begin_call()
        self._num_in_flight += 1
        num_tokens = estimate_tokens(body["messages"]) + self._config.max_reply_tokens
        try:
            answer = await self._client.complete(body, num_tokens)
        except RequestRejectedError as error:
            if error.status in SETTINGS_STATUSES:
                raise
            why = str(error)
        except EngineError as error:
            why = str(error)
        else:
            self._spending.add(self._spending.price(answer))
            return answer
        finally:
            self._num_in_flight -= 1
        return {FAILED: why}

    async def _reject_if_spent(self) -> None:
        if (limit := self._spending.exceeded()) is None:
            return
        if self._config.when_spent == "end":
            while self._num_in_flight:  # their answers are paid for, and kept for a later run
                await asyncio.sleep(0.05)
            raise JudgeError(
                f"the judge's budget is spent: {limit}; start a run from the last checkpoint with "
                "a higher limit, or set judge.when_spent=continue"
            )
        if not self._has_told:
            self._has_told = True
            _log.warning("the judge's budget is spent (%s); the run goes on without it", limit)
        raise BudgetSpentError

    def _body(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": list(messages),
            "temperature": 0.0,
            self._max_tokens_key: self._config.max_reply_tokens,
        }
        if self._config.answer_format == "json_schema":
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": schema},
            }
        body |= self._config.parameters
        return {key: value for key, value in body.items() if value is not None}


def require_judge(term: str, judge: object | None) -> Judge | None:
    """Return the judge that a reward term asks; None without one. Raises ConfigError."""
    if judge is not None and not isinstance(judge, Judge):
        raise ConfigError(
            f"reward.terms.{term} cannot ask the judge that this type of `judge` opens, a "
            f"{type(judge).__name__}: its build has to yield a {Judge.__module__}.Judge"
        )
    return judge


@asynccontextmanager
async def open_judge(
    config: JudgeConfig, folder: Path, *others: Path, log: Path | None = None, repeat: int = 0
) -> AsyncIterator[Judge]:
    """Open the judge that the configuration names.

    others: folders of other runs' answers, which are read only.
    log: of a server that is started for the judge; None: `server.log` in `folder`.
    repeat: above 0: ask again what was asked with another number.
    """
    assert isinstance(config, OpenAIJudgeConfig | VllmJudgeConfig)
    verdicts = Verdicts(folder, others)
    client: ChatClient | VllmJudgeClient
    if isinstance(config, VllmJudgeConfig):
        client = VllmJudgeClient(config, log or folder / "server.log")
    else:
        client = ChatClient(config, block="judge")
    async with client:
        yield Judge(config, client, verdicts, repeat=repeat)


def _text(answer: Mapping[str, Any]) -> str:
    choices = answer.get("choices")  # of a file that somebody may have changed
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, str) else ""


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def json_object(text: str) -> dict[str, Any]:
    """Return the last JSON object in a text that is not inside another one.

    The last, because a judge that thinks aloud may quote what an episode says about its verdict.

    Raises UnusableAnswerError: there is none, or it cannot be told which one is the last.
    """
    begin, end_mark = THINK
    if text.lstrip().startswith(begin):
        _, mark, text = text.partition(end_mark)
        if not mark:
            raise UnusableAnswerError("it ends inside a thought")
    decoder = json.JSONDecoder()
    last: dict[str, Any] | None = None
    end = num_failed = 0
    while match := _START.search(text, end):
        try:
            last, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            end, num_failed = match.start() + 1, num_failed + 1
            if num_failed > MAX_STARTS:
                raise UnusableAnswerError(
                    f"more than {MAX_STARTS} braces begin no complete JSON object"
                ) from None
    if last is None:
        raise UnusableAnswerError("it has no complete JSON object")
    return last


def score_of(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not 0.0 <= value <= 1.0:  # NaN is in no range
        raise UnusableAnswerError(
            f"the score of {what} is {str(value)[:80]!r}, expected 0.0 to 1.0"
        )
    return float(value)


def number_of(value: Any, count: int, what: str) -> int:
    """Return a number in 1..count that is given as 2, as "2" or in words as "turn 2".

    Raises UnusableAnswerError, which names what it is the number of.
    """
    numbers = [value] if type(value) is int else re.findall(r"\d{1,9}", str(value))
    if len(numbers) != 1 or not 1 <= int(numbers[0]) <= count:
        raise UnusableAnswerError(f"{what} {str(value)[:80]!r} is not one of 1 to {count}")
    return int(numbers[0])
