"""`env.adapter`: how observations become chat messages, and replies become actions."""

from typing import Annotated, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import Block, PythonTarget


class ExampleExchange(Block):
    """A user message and a good reply to it. Both are plain text, not templates."""

    user: str
    reply: str


SYSTEM = Field(
    description="Jinja template of the system message; it sees the observation; null: none"
)
UNUSABLE = Field(
    description="Jinja template of the answer to an unusable reply; {{ why }} is the reason"
)
EXAMPLES = Field(
    description="exchanges that the model is shown before its first message, which teach it the "
    "form of a reply (few-shot prompt)"
)


class TextAdapterConfig(Block):
    """Messages by Jinja templates, actions by a regular expression (conf/env/adapter/text.yaml)."""

    type: Literal["text"]
    system: str | None = SYSTEM
    examples: list[ExampleExchange] = EXAMPLES
    first: str = Field(description="Jinja template of the first user message")
    following: str = Field(description="Jinja template of the user message after each step")
    unusable: str = UNUSABLE
    pattern: str = Field(
        description="regular expression searched in the reply; its named groups are the action"
    )


class JsonAdapterConfig(Block):
    """The action as a JSON object, checked against the environment's own schema.

    Templates see the observation's fields and {{ action_schema }}. Values:
    conf/env/adapter/json.yaml.
    """

    type: Literal["json"]
    system: str | None = Field(description="Jinja template of the system message; null: none")
    examples: list[ExampleExchange] = EXAMPLES
    first: str | None = Field(
        description="Jinja template of the first user message; null: the observation as JSON"
    )
    following: str | None = Field(
        description="Jinja template of the user message after each step; null: the same as first"
    )
    unusable: str = UNUSABLE
    hidden_fields: list[str] = Field(
        description="optional fields of the action that {{ action_schema }} leaves out"
    )


class ToolAdapterConfig(Block):
    """The tools of an MCP environment; a reply may call several (conf/env/adapter/tool.yaml)."""

    type: Literal["tool"]
    system: str | None = SYSTEM
    examples: list[ExampleExchange] = EXAMPLES
    first: str | None = Field(
        description="Jinja template of the first user message; null: the observation as JSON"
    )
    following: str | None = Field(
        description="Jinja template of a call's result; null: the result's text or its error"
    )
    unusable: str = UNUSABLE
    plain_reply: Literal["final", "unusable"] = Field(
        description="how a reply without a call counts; final: it ends the episode; unusable: as a "
        "mistake, which the model is told"
    )


class PythonAdapterConfig(PythonTarget):
    """An `openenv_pipe.environments.adapters.base.Adapter` of your own: target(**options)."""


AdapterConfig = Annotated[
    TextAdapterConfig | JsonAdapterConfig | ToolAdapterConfig | PythonAdapterConfig,
    Field(discriminator="type"),
]
