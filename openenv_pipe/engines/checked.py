"""Check what a user's own engine returns, before anything is stored or trained on."""

from typing import Any

from openenv_pipe.engines.base import Completion, Engine, TextReply, TokenRequest
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.user_numbers import shown
from openenv_pipe.types import Finish


class CheckedEngine:
    """Wraps a user's engine, and checks its replies; other methods are the engine's own."""

    def __init__(self, engine: Engine, name: str, vocabulary_size: int | None) -> None:
        """name: for messages. vocabulary_size: token ids are below it; None: any are accepted."""
        self._engine = engine
        self._name = name
        self._vocabulary_size = vocabulary_size

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._engine, attribute)

    async def generate(self, request: Any) -> Any:
        """Return the engine's reply. Raises ConfigError if it does not fit the request."""
        reply = await self._engine.generate(request)
        if isinstance(request, TokenRequest):
            problem = self._problem_of(reply, request.max_tokens)
        elif isinstance(reply, TextReply) and isinstance(reply.text, str):
            problem = None
        else:
            problem = "expected a TextReply with a text"
        if problem is not None:
            raise ConfigError(f"{self._name}: generate returned {shown(reply)}; {problem}")
        return reply

    def _problem_of(self, reply: Any, max_tokens: int) -> str | None:
        """Return what is wrong with a completion; the learner rejects non-finite logprobs."""
        if not isinstance(reply, Completion):
            return "expected a Completion"
        ids, logprobs, versions = reply.token_ids, reply.logprobs, reply.policy_versions
        for name, values, kinds in (
            ("token_ids", ids, (int,)),
            ("logprobs", logprobs, (int, float)),
            ("policy_versions", versions, (int,)),
        ):
            if not isinstance(values, list) or not all(isinstance(each, kinds) for each in values):
                expected = " or ".join(kind.__name__ for kind in kinds)
                return f"expected a list of Python's own numbers ({expected}) as {name}"
        if not 1 <= len(ids) <= max_tokens:
            return f"it has {len(ids)} token_ids, expected 1 to {max_tokens}"
        if len(logprobs) != len(ids):
            return f"it has {len(ids)} token_ids and {len(logprobs)} logprobs, expected one each"
        outside = [each for each in ids if each < 0 or each >= (self._vocabulary_size or each + 1)]
        if outside:
            return f"token {outside[0]} is not in the vocabulary of {self._vocabulary_size} tokens"
        if not versions:
            return "it has no policy_versions, expected those that sampled it"
        if not isinstance(reply.finish, Finish):
            return "expected a Finish as finish"
        return None
