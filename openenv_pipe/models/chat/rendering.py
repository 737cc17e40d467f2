"""Render a tokenizer's chat template, within a time limit."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.limited_program import LimitedProgramError, output_of
from openenv_pipe.models.chat.messages import alternating
from openenv_pipe.models.chat.template_source import GENERATION
from openenv_pipe.system.time_limit import run_limited
from openenv_pipe.types import Message, Tool

RENDER_LIMIT_S = 10.0  # of one prompt, which takes a template about a millisecond
TRIAL_CPU_S, TRIAL_MB = 10, 512  # of a few short conversations


class RejectedMessagesError(ConfigError):
    """A template cannot render messages. If it takes too long, the error is a ConfigError only."""


@lru_cache(maxsize=8)
def check_template(template: str, folder: str) -> None:
    """Try a model's template in a process of its own: nothing interrupts huge computations.

    Raises ConfigError: It takes more time or memory than any template needs.
    """
    text = GENERATION.sub("", template).encode(errors="replace")
    try:
        output_of("template", text, cpu_s=TRIAL_CPU_S, memory_mb=TRIAL_MB)
    except LimitedProgramError as error:
        raise ConfigError(
            f"the chat template of {folder!r} cannot be used: {error}; set model.chat_template to "
            "one that can"
        ) from None


class TemplateRenderer:
    """Renders messages by the chat template of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.template: str = tokenizer.chat_template
        # Whether the template accepts several user messages in a row; else they become one.
        self.takes_runs = True
        one, two = ({"role": "user", "content": text} for text in ("one", "two"))
        try:
            self.render((one, two), prompt=True)
        except RejectedMessagesError:
            self.takes_runs = False

    def render(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool,
        tools: Sequence[Tool] = (),
        template: str | None = None,
    ) -> str:
        """Return the text of a conversation.

        prompt: whether the text ends where the model's next turn begins.
        template: another template than the tokenizer's, which gets the messages as they are.

        Raises ConfigError: The template cannot render it, or takes too long.
        """
        if template is None and not self.takes_runs:
            messages = alternating(messages)
        rendering = partial(
            self._tokenizer.apply_chat_template,
            list(messages),
            list(tools) or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompt,
        )
        try:
            return run_limited(rendering, RENDER_LIMIT_S)
        except Exception as error:  # whatever an expression of the template raises
            roles = ", ".join(message["role"] for message in messages)
            of = f" of {self._tokenizer.name_or_path!r}" if self._tokenizer.name_or_path else ""
            kind = ConfigError if isinstance(error, TimeoutError) else RejectedMessagesError
            raise kind(
                f"the chat template{of} cannot render messages of the roles {roles}: {error}; set "
                "model.chat_template to one that can"
            ) from error
