"""A rule: settings that are each valid, but do not go together."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from openenv_pipe.system.secrets import redact

if TYPE_CHECKING:  # The schema reads the rules.
    from openenv_pipe.config.schema.run import RunConfig

# When a rule has to hold. always: for every configuration; train: before training; play: before
# episodes are played, in training or in an evaluation; eval: before an evaluation.
Moment = Literal["always", "train", "play", "eval"]
MAX_VALUE_LENGTH = 80
MAX_PRODUCT = 10**6  # of two counts, such as tasks and samples of each


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Settings that do not go together, and what to do about it.

    The message begins with the keys and their values. A block stands for its type: `engine` is
    shown as engine=vllm. `*` stands for the names of a mapping.
    """

    keys: tuple[str, ...]
    # Whether a configuration breaks the rule; for keys with `*`, the names that break it.
    breaks: Callable[["RunConfig"], bool | Sequence[str]]
    # Why these settings do not go together, and what to set instead. A key in braces stands for its
    # value.
    advice: str
    when: Moment = "always"

    @property
    def block(self) -> str:
        """The top-level key under which the rule is listed."""
        return self.keys[0].split(".")[0]

    @property
    def blocks(self) -> set[str]:
        """The top-level keys that the rule is about."""
        return {key.split(".")[0] for key in self.keys}

    def violations(self, config: "RunConfig") -> list[str]:
        found = self.breaks(config)
        if isinstance(found, bool):
            return [self._message(config)] if found else []
        return [self._message(config, name) for name in found]

    def _message(self, config: "RunConfig", name: str = "") -> str:
        """Return the message of one violation. name: replaces `*`."""
        first, *others = [
            f"{key.replace('*', name)}={_shown(config, key, name)}" for key in self.keys
        ]
        together = f" with {' and '.join(others)}" if others else ""
        advice = re.sub(r"\{(.+?)\}", lambda match: _shown(config, match[1]), self.advice)
        return f"{first}{together}: {advice}"


class BrokenRulesError(ValueError):
    """A configuration breaks rules. `messages` has one for each violation."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("; ".join(messages))
        self.messages = messages


def _shown(config: Any, key: str, name: str = "") -> str:
    """Return a value as it is written on the command line: a block is its type."""
    value = config
    for part in key.split("."):
        part = name if part == "*" else part
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    if isinstance(value, Mapping):
        value = [*value]  # the names
    if isinstance(value, list):
        value = [getattr(each, "type", each) for each in value]
    value = getattr(value, "type", value)
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = redact(text)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
