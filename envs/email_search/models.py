"""What crosses the wire at reset. Steps are OpenEnv's own MCP actions and observations."""

from openenv.core.env_server.types import Observation
from pydantic import Field


class EmailSearchObservation(Observation):
    """The question, and what can be done about it."""

    question: str = Field(default="", description="What to find out")
    instructions: str = Field(default="", description="How an answer is given and graded")
    num_messages: int = Field(default=0, description="Messages in the mailbox")
    calls_left: int = Field(default=0, description="Calls of search and read before the answer")
