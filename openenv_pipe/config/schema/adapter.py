"""`env.adapter`: how observations become chat, and replies become actions."""

from typing import Annotated, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import Block, PythonTarget


class TextAdapterConfig(Block):
    """Observation to chat message by Jinja, reply to action by a regular expression."""

    type: Literal["text"]
    system: str | None = Field(description="system message; a Jinja template of the observation")
    first: str = Field(description="Jinja template of the first user message")
    following: str = Field(description="Jinja template of the user message after each step")
    unusable: str = Field(
        description="Jinja template of the answer to an unusable reply: {{ why }}"
    )
    pattern: str = Field(description="regex searched in the reply; its named groups are the action")


class JsonAdapterConfig(Block):
    """The action as a JSON object, in the form that the environment's own schema gives it.

    Templates see the observation's fields and {{ action_schema }}.
    """

    type: Literal["json"]
    system: str | None = Field(description="system message; a Jinja template")
    first: str | None = Field(
        description="Jinja template of the first user message; null: the observation as JSON"
    )
    following: str | None = Field(
        description="Jinja template of the user message after each step; null: as first"
    )
    unusable: str = Field(
        description="Jinja template of the answer to an unusable reply: {{ why }}"
    )


class ToolAdapterConfig(Block):
    """The tools of an MCP environment, called in replies; several calls in one are allowed."""

    type: Literal["tool"]
    system: str | None = Field(description="system message; a Jinja template of the observation")
    first: str | None = Field(
        description="Jinja template of the first user message; null: the observation as JSON"
    )
    following: str | None = Field(
        description="Jinja template of a call's result; null: its text or its error"
    )
    unusable: str = Field(
        description="Jinja template of the answer to an unusable reply: {{ why }}"
    )
    plain_reply: Literal["final", "unusable"] = Field(
        description="what a reply without a call is: the end of the episode, or a mistake"
    )


class PythonAdapterConfig(PythonTarget):
    """An `openenv_pipe.environments.adapters.base.Adapter` of your own: target(**options)."""


AdapterConfig = Annotated[
    TextAdapterConfig | JsonAdapterConfig | ToolAdapterConfig | PythonAdapterConfig,
    Field(discriminator="type"),
]
