"""Made-up episodes of the environment echo, and their scores by a scripted judge, without a run."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.extras.judges.judge import open_judge
from openenv_pipe.rewards import Scorer
from openenv_pipe.types import Episode, Finish, Group, Status, Step, Task, Turn
from tests.judge_server import JudgeServer

LETTER = {"role": "user", "content": "b"}
QUICK = ["judge.max_retries=1", "judge.timeout_s=20"]


def episode(
    member: int, *replies: str, reward: float = 0.0, reset: dict[str, Any] | None = None
) -> Episode:
    """Return an episode whose right reply in each turn is b."""
    task = Task(id="train/0", split="train", index=0, seed=1, reset=reset or {})
    turns = [
        Turn(
            prompt_ids=[1],
            completion_ids=[2],
            logprobs=[0.0],
            finish=Finish.STOP,
            policy_versions=[0],
            reply=reply,
            messages=[LETTER],
            steps=[Step(action={}, observation={"letter": "b"}, reward=reward)],
        )
        for reply in replies
    ]
    return Episode(task=task, member=member, seed=member, turns=turns, status=Status.TURN_LIMIT)


def group(*episodes: Episode) -> Group:
    return Group(id="step 1/0", task=episodes[0].task, episodes=list(episodes), seed=5)


@cache
def composed(*overrides: str) -> RunConfig:
    given = ["judge=openai", "judge.model=scripted", "judge.api_key=null", *QUICK, *overrides]
    return compose(["conf=echo", *given]).config


def score_groups(
    server: JudgeServer, folder: Path, groups: list[Group], *overrides: str, accept: bool = True
) -> None:
    """Score the groups as a run does; its answers are kept in `folder`."""
    config = composed(*overrides)
    endpoint = config.judge.model_copy(update={"base_url": server.url})

    async def main() -> None:
        async with open_judge(endpoint, folder) as judge:
            scorer = Scorer(config.reward, 1.0, judge)
            await asyncio.gather(*map(scorer.score, groups))
            if accept:
                scorer.accept(groups)

    asyncio.run(main())
