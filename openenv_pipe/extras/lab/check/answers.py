"""Check the scoring of tasks that come with their answers, by playing these answers.

A task's own answer has to earn the full reward; another task's, an empty one and the question must
not. This applies to environments whose tasks have a reset keyword that is named like an answer, and
whose actions are one text.
"""

import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.client.metadata import ANSWER_FIELD_NAMES, fetch_metadata
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.schemas import Schema
from openenv_pipe.errors import StepRejectedError
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.extras.lab.episodes import play_to_end
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import Action, Observation, Task

MAX_TASKS = 500  # of each split, evenly spaced
LIMIT_S = 20.0  # for each kind of answer
ACCEPTED_SHARE = 0.1  # fraction of wrong answers with the full reward from which on it is a fault
FREQUENT_SHARE = 0.5  # fraction of the tasks that one answer solves, above which little is learned
MAX_SHOWN = 3  # tasks that a message names
MAX_ANSWER = 60  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredTask:
    """What a task's episode earned with an answer; if it failed, None and the reason."""

    task: Task
    answer: str
    reward: float | None
    why: str = ""

    def earns(self, full: float) -> bool:
        return self.reward is not None and self.reward >= full

    @property
    def text(self) -> str:
        earned = self.why or f"earns {self.reward:.3g}"
        return f"{self.task.id} with {shortened(self.answer, MAX_ANSWER)!r} {earned}"


async def probe_answers(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Play every task with its own answer, another task's, none, a constant, and its question."""
    tasks = [
        each[index]
        for each in (subject.tasks, subject.eval_tasks)
        for index in range(0, len(each), 1 + (len(each) - 1) // MAX_TASKS)
    ]
    schema = (await fetch_metadata(subject.host.urls[0], subject.host.access)).action
    field = _text_field(schema)
    answers = [answer for task in tasks if (answer := own_answer(task, field)) is not None]
    is_answer = field in ANSWER_FIELD_NAMES or subject.env.max_turns == 1
    if field is None or not is_answer or len(answers) < len(tasks):
        return
    full = subject.env.success_reward
    own = await _play(subject, field, tasks, answers)
    yield own_line(own, full)
    scored = [each for each in own if each.reward is not None]  # The line above has the others.
    if not scored:
        return
    tasks, answers = [each.task for each in scored], [each.answer for each in scored]
    others = [_another(answers, place) for place in range(len(tasks))]
    wrong = await _play(subject, field, tasks, others)
    silent = await _play(subject, field, tasks, [""] * len(tasks))
    yield wrong_line(wrong, silent, full)
    frequent = Counter(answers).most_common(1)[0][0]
    yield frequent_line(await _play(subject, field, tasks, [frequent] * len(tasks)), full)
    if any(texts := [_told(task) for task in tasks]):
        yield repeated_line(await _play(subject, field, tasks, texts), full)


def own_line(played: Sequence[AnsweredTask], full: float) -> Line:
    less = [each for each in played if not each.earns(full)]
    measured = {"tasks": len(played), "full": len(played) - len(less)}
    if not less:
        text = f"the task's own answer earns the full reward, {full:.3g}, in {len(played)} tasks"
        return Line("own answers", Result.OK, text, measured)
    text = (
        f"the task's own answer does not earn the full reward, {full:.3g}, in {len(less)} of "
        f"{len(played)} tasks: {_named(less)}; is the scoring wrong, or are these rows?"
    )
    return Line("own answers", Result.FAIL, text, measured)


def wrong_line(wrong: Sequence[AnsweredTask], silent: Sequence[AnsweredTask], full: float) -> Line:
    """Report how often another task's answer, and an empty one, earn the full reward, or fail."""
    failed = [each for each in (*silent, *wrong) if each.reward is None]
    if failed:
        text = (
            f"{len(failed)} of {len(wrong) + len(silent)} wrong and empty answers have no reward: "
            f"{_named(failed)}; score any text"
        )
        return Line("wrong answers", Result.FAIL, text, {"failed": len(failed)})
    accepted = [each for each in wrong if each.earns(full)]
    empty = [each for each in silent if each.earns(full)]
    measured = {"tasks": len(wrong), "others": len(accepted), "empty": len(empty)}
    if not accepted and not empty:
        text = (
            "no empty answer and no answer of another task earns the full reward, in "
            f"{len(wrong)} tasks"
        )
        return Line("wrong answers", Result.OK, text, measured)
    text = (
        f"the full reward goes to {len(accepted)} of {len(wrong)} answers of another task, and "
        f"to {len(empty)} of {len(silent)} empty ones: {_named([*empty, *accepted])}"
    )
    fails = empty or len(accepted) >= ACCEPTED_SHARE * len(wrong)
    return Line("wrong answers", Result.FAIL if fails else Result.WARN, text, measured)


def frequent_line(played: Sequence[AnsweredTask], full: float) -> Line:
    """Report in how many tasks the most frequent answer earns the full reward."""
    num_full = sum(each.earns(full) for each in played)
    measured = {"tasks": len(played), "full": num_full}
    answer = shortened(played[0].answer, MAX_ANSWER)
    text = f"always {answer!r} earns the full reward in {num_full} of {len(played)} tasks"
    if num_full <= FREQUENT_SHARE * len(played):
        return Line("constant answer", Result.OK, text, measured)
    text += "; a model learns that first, without reading: balance the answers"
    return Line("constant answer", Result.WARN, text, measured)


def repeated_line(played: Sequence[AnsweredTask], full: float) -> Line:
    """Report in how many tasks the question itself earns the full reward as an answer."""
    right = [each for each in played if each.earns(full)]
    measured = {"tasks": len(played), "full": len(right)}
    text = f"repeating the question earns the full reward in {len(right)} of {len(played)} tasks"
    if len(right) < ACCEPTED_SHARE * len(played):
        return Line("question as answer", Result.OK, text, measured)
    text += (
        f": {_named(right)}. So does a wrong sentence with the words of the question; let "
        "env.adapter.pattern read the answer alone, and show its form by env.adapter.examples"
    )
    return Line("question as answer", Result.WARN, text, measured)


async def _play(
    subject: EnvironmentUnderTest, field: str, tasks: Sequence[Task], answers: Sequence[str]
) -> list[AnsweredTask]:
    """Play the tasks with these answers; those that the time limit cut off are left out."""
    played: dict[int, AnsweredTask] = {}

    async def do(session: Session, place: int) -> None:
        task, answer = tasks[place], answers[place]

        def choose(observations: Sequence[Observation], draw: random.Random) -> Sequence[Action]:
            return [{field: answer}]

        play = PlayedEpisode(task=task)
        reward, why = None, ""
        try:
            await play_to_end(session, play, choose, subject.env, random.Random(0))
        except StepRejectedError as error:
            why = f"is rejected: {error!s:.200}"
        else:
            reward = None if play.failure else play.reward
            why = f"fails: {play.failure!s:.200}" if play.failure else ""
        played[place] = AnsweredTask(task=task, answer=answer, reward=reward, why=why)

    await subject.spread(range(len(tasks)), do, limit_s=LIMIT_S)
    return [played[place] for place in sorted(played)]


def own_answer(task: Task, field: str | None) -> str | None:
    """Return the task's answer if its reset has one, as text.

    field: the action's. If it is named like an answer, a reset keyword of this name is the answer.
    """
    found = [value for name, value in task.reset.items() if name in ANSWER_FIELD_NAMES]
    if field in ANSWER_FIELD_NAMES and field in task.reset:
        found = [task.reset[field]]
    if len(found) != 1 or not isinstance(found[0], str | int | float):
        return None
    answer, choices = found[0], task.reset.get("choices")
    if type(answer) is int and isinstance(choices, list) and 0 <= answer < len(choices):
        return str(choices[answer])
    return answer if isinstance(answer, str) else json.dumps(answer)


def _told(task: Task) -> str:
    """Return the texts that a task's reset has beside its answer."""
    texts = (value for name, value in task.reset.items() if name not in ANSWER_FIELD_NAMES)
    return "\n".join(text for text in texts if isinstance(text, str))


def _another(answers: Sequence[str], place: int) -> str:
    """Return the next task's answer that differs from this one's; a text that no task has, if none
    does."""
    after = (*answers[place + 1 :], *answers[:place])
    return next((other for other in after if other != answers[place]), f"not {answers[place]}")


def _text_field(schema: Schema) -> str | None:
    """Return the name of an action's only field beside metadata, if it is a text."""
    fields = {
        name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"
    }
    texts = [name for name, kind in fields.items() if kind.get("type") == "string"]
    return texts[0] if len(fields) == len(texts) == 1 else None


def _named(answered: Sequence[AnsweredTask]) -> str:
    more = f" and {len(answered) - MAX_SHOWN} more" if len(answered) > MAX_SHOWN else ""
    return ", ".join(each.text for each in answered[:MAX_SHOWN]) + more
