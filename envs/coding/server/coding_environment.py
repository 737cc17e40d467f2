"""The OpenEnv environment of Coding; other modules hold its rules."""

from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..episode import DEFAULT_ATTEMPTS, MAX_ATTEMPTS, OPEN, Episode
from ..models import CodingAction, CodingObservation, Example
from ..problems import SPLITS, Case, TaskError, choose_problem, num_tasks, problems


class CodingEnvironment(Environment[CodingAction, CodingObservation, State]):
    """Plays one episode at a time; `reset` starts the next.

    Its methods are synchronous on purpose: OpenEnv runs them in one thread per session, so that
    waiting for a program or for a free process does not block other sessions.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._episode: Episode | None = None
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
        attempts: int = DEFAULT_ATTEMPTS,
    ) -> CodingObservation:
        """Start an episode whose problem is given by `index`, else by `seed`, else random.

        Raises TaskError (a ValueError) for a split, index, seed or number of attempts that does
        not exist; the episode in progress then continues.
        """
        if type(attempts) is not int or not 1 <= attempts <= MAX_ATTEMPTS:
            raise TaskError(f"attempts must be an integer from 1 to {MAX_ATTEMPTS}: {attempts!r}")
        problem = choose_problem(split, index, seed)
        self._episode = Episode(problem=problem, attempts=attempts)
        self._state = State(episode_id=episode_id or str(uuid4()))
        return _observe(self._episode, reward=None)

    def step(
        self, action: CodingAction, timeout_s: float | None = None, **_: Any
    ) -> CodingObservation:
        """Take one attempt. Before the first `reset` and after the end: `done` and no reward."""
        if self._episode is None:
            feedback = "No episode was started. Reset first."
            return CodingObservation(feedback=feedback, reward=0.0, done=True)
        self._state.step_count += self._episode.status == OPEN
        return _observe(self._episode, reward=self._episode.submit(action.code))

    @property
    def state(self) -> State:
        """Return the episode's id and the number of attempts; never the tests."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="coding",
            description="Write a small Python function that passes hidden tests",
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
            for split in SPLITS
        ]

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        return num_tasks(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the reset keywords of one task. Raises TaskError."""
        choose_problem(split, index, seed=None)
        return {"split": split, "index": index}

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the reset keywords of the tasks `start:stop`."""
        indices = range(len(problems(split)))[start:stop]
        return [{"split": split, "index": index} for index in indices]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the reset keywords of all tasks of the split."""
        return self.get_task_range(split)


def _observe(episode: Episode, reward: float | None) -> CodingObservation:
    problem, verdict = episode.problem, episode.verdict
    examples, hidden = problem.tests()
    return CodingObservation(
        statement=problem.statement,
        signature=problem.signature,
        examples=[_example(problem.function, test) for test in examples],
        feedback=verdict.feedback,
        error=verdict.error,
        message=verdict.message,
        tests_passed=verdict.tests_passed,
        tests_total=len(hidden),
        attempt=episode.attempt,
        attempts_left=episode.attempts - episode.attempt,
        status=episode.status,
        reward=reward,
        done=episode.status != OPEN,
    )


def _example(function: str, test: Case) -> Example:
    arguments = ", ".join(map(repr, test.arguments))
    return Example(call=f"{function}({arguments})", result=repr(test.expected))
