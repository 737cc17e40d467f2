"""The OpenEnv environment of email search, with MCP tools; other modules hold its rules."""

from contextlib import suppress
from typing import Annotated, Any
from uuid import uuid4

from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field

from ..episode import DEFAULT_CALLS, MAX_CALLS, MAX_HITS, Episode, OutOfTurn
from ..index import index as open_index
from ..mailbox import mailbox
from ..models import EmailSearchObservation
from ..tasks import MAILBOXES, TaskError, choose_task, num_tasks

INSTRUCTIONS = (
    "Where messages disagree, the latest one counts. Answer with the amount, date, number or name "
    'alone and cite the message that says so; a wrong answer costs more than "I don\'t know".'
)


class EmailSearchEnvironment(MCPEnvironment):
    """Plays one episode at a time; `reset` starts the next. Each session has its own tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._episode: Episode | None = None
        self._state = State()
        super().__init__(self._tools())

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
        max_calls: int = DEFAULT_CALLS,
    ) -> EmailSearchObservation:
        """Start an episode whose question is given by `index`, else by `seed`, else random.

        Raises TaskError (a ValueError) for a split, index, seed or number of calls that does not
        exist; the episode in progress then continues.
        """
        if type(max_calls) is not int or not 1 <= max_calls <= MAX_CALLS:
            raise TaskError(f"max_calls must be an integer from 1 to {MAX_CALLS}: {max_calls!r}")
        task = choose_task(split, index, seed)
        open_index(task.mailbox_number)
        self._episode = Episode(task=task, max_calls=max_calls)
        self._state = State(episode_id=episode_id or str(uuid4()))
        return EmailSearchObservation(
            question=task.question.text,
            instructions=INSTRUCTIONS,
            num_messages=len(mailbox(task.mailbox_number).messages),
            calls_left=max_calls,
        )

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **_: Any
    ) -> Observation:
        """List the tools or call one. Only the step that answers has a reward."""
        was_over = self._episode is None or self._episode.is_over
        observation = await super().step_async(action, timeout_s)
        if isinstance(action, CallToolAction):
            assert isinstance(observation, CallToolObservation)
            self._finish(observation, was_over)
        return observation

    def _finish(self, observation: CallToolObservation, was_over: bool) -> None:
        """Set reward and `done` in the observation of a call."""
        observation.reward, observation.done = 0.0, True
        if self._episode is None or was_over:
            return
        self._state.step_count += 1
        if observation.error is not None and not self._episode.is_over:
            with suppress(OutOfTurn):
                self._episode.spend_call()  # No tool ran, so no tool has counted the call.
        observation.done = self._episode.is_over
        if self._episode.grade is not None:
            grade = self._episode.grade
            observation.reward = grade.reward
            observation.metadata = {"verdict": grade.verdict, "citation": grade.citation}

    def _step_impl(
        self, action: Action, timeout_s: float | None = None, **_: Any
    ) -> CallToolObservation:
        """Raise ValueError, because all actions of this environment are MCP actions."""
        raise ValueError(f"actions are list_tools and call_tool, got {type(action).__name__}")

    @property
    def state(self) -> State:
        """Return the episode's id and the number of calls; never the answer."""
        return self._state

    def _tools(self) -> FastMCP:
        """Build the three tools, which act on this session's episode."""
        server = FastMCP("email_search")

        @server.tool
        async def search(
            query: Annotated[str, Field(description="Words to look for")],
            limit: Annotated[int, Field(description=f"Messages to list, 1 to {MAX_HITS}")] = 5,
        ) -> str:
            """Search the mailbox. The best messages come first, each with its id."""
            return self._current().search(query, limit)

        @server.tool
        async def read(message_id: Annotated[str, Field(description="Such as m017")]) -> str:
            """Read one message in full."""
            return self._current().read(message_id)

        @server.tool
        async def answer(
            text: Annotated[str, Field(description='The answer alone, or "I don\'t know"')],
            message_ids: Annotated[list[str], Field(description="The messages that say so")],
        ) -> str:
            """Answer the question, once."""
            return self._current().answer(text, message_ids)

        return server

    def _current(self) -> Episode:
        if self._episode is None:
            raise OutOfTurn("No episode was started. Reset first.")
        return self._episode

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="email_search",
            description="Answer a question about a mailbox with tools to search and read it",
            version="0.1.0",
        )

    def list_splits(self) -> list[dict[str, Any]]:
        """List the splits with their numbers of tasks."""
        return [
            {
                "name": split,
                "type": "train" if split == "train" else "validation",
                "num_tasks": num_tasks(split),
            }
            for split in MAILBOXES
        ]

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        return num_tasks(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the reset keywords of one task. Raises TaskError."""
        choose_task(split, index, seed=None)
        return {"split": split, "index": index}

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the reset keywords of the tasks `start:stop`."""
        indices = range(num_tasks(split))[start:stop]
        return [{"split": split, "index": index} for index in indices]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the reset keywords of all tasks of the split."""
        return self.get_task_range(split)
