"""Check the server's answers, also those to wrong messages, against OpenEnv's protocol."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from openenv_pipe.commands.findings import Line, Result, failed
from openenv_pipe.commands.recorded_play import PlayedEpisode, reset
from openenv_pipe.environments.adapters.templates import BOOKKEEPING, EMPTY, observation_text
from openenv_pipe.environments.client.protocol import EXECUTION_ERROR, StepResult, is_wrong_return
from openenv_pipe.environments.client.session import Session
from openenv_pipe.errors import SessionError, StepRejectedError
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.extras.lab.episodes import is_complaint, play_to_end
from openenv_pipe.rollout.collector import done_at_reset
from openenv_pipe.system.tasks import awaited
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import Action

NUM_PLAYS = 5  # tasks that are reset, and played to see an episode that ends
MAX_SHOWN = 300  # characters of an observation or a rejection
UNKNOWN_FIELD = {"no_such_field_of_any_action": 1}


async def probe_protocol(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Yield one line for each part of the protocol, each checked in its own session."""
    for name, probe in PROBES.items():
        try:
            async with subject.session() as session:
                result, text = await probe(subject, session)
                yield Line(name, result, text)
        except SessionError as error:
            yield failed(name, error)


async def _reset(subject: EnvironmentUnderTest, session: Session) -> tuple[Result, str]:
    indices = range(min(NUM_PLAYS, len(subject.tasks)))
    firsts = [await reset(session, subject.task(index), subject.env) for index in indices]
    done = [each.observation for each in firsts if each.done]
    if len(done) == len(firsts):
        return Result.FAIL, done_at_reset(done[0])
    text = first_text(firsts[0])
    if done:
        shown = shortened(observation_text(done[0]), MAX_SHOWN)
        return Result.WARN, f"{len(done)} of {len(firsts)} tasks are done at their reset: {shown}"
    if is_complaint(firsts[0].observation):
        return Result.WARN, (
            f"{text}, which reads like a complaint: reset may need keywords "
            "(env.tasks.train.reset), or the server data or a key (env.variables)"
        )
    return Result.OK, text


def first_text(first: StepResult) -> str:
    """Describe the answer to a reset, and name the fields that are not shown."""
    seen = first.observation
    left_out = [name for name, value in seen.items() if value in EMPTY or name in BOOKKEEPING]
    if "metadata" in seen and len(left_out) < len(seen) - 1:  # shown only if nothing else is
        left_out = list(dict.fromkeys([*left_out, "metadata"]))
    text = f"{len(seen)} fields, reward {first.reward}: "
    text += shortened(observation_text(seen), MAX_SHOWN)
    if left_out:
        text += f"; not shown, as empty or bookkeeping: {shortened(', '.join(left_out), MAX_SHOWN)}"
    return text


async def _step(subject: EnvironmentUnderTest, session: Session) -> tuple[Result, str]:
    """Play random actions; one that raises counts as unusable, and does not end the episode."""
    lenient = subject.env.model_copy(update={"step_exception": "unusable"})
    num_taken, rejections, reward = 0, list[StepRejectedError](), 0.0
    for name, chooser in subject.choosers.items():
        if name == "scripted" and num_taken:
            continue  # It is asked only where all random actions are rejected.
        for index in range(min(NUM_PLAYS, len(subject.tasks))):
            play = PlayedEpisode(task=subject.task(index))
            await play_to_end(session, play, chooser, lenient, random.Random(index))
            num_taken, reward = num_taken + len(play.actions), reward + play.reward
            rejections += play.rejections
    if not num_taken and not rejections:
        return Result.FAIL, "not tried, because every episode is done at its reset"
    if not rejections:
        return Result.OK, f"{num_taken} random actions answered, reward {reward:.3g}"
    what = f"{len(rejections)} of {num_taken + len(rejections)} actions were rejected"
    raised = [each for each in rejections if each.code == EXECUTION_ERROR]
    wrong = next(filter(is_wrong_return, raised), None)
    shown = shortened(str(wrong or (raised or rejections)[0]), MAX_SHOWN)
    if wrong is not None:
        return Result.FAIL, f"{what}: {shown}"
    if not num_taken:
        how = "by an exception on the server" if raised else "as invalid"
        return Result.FAIL, (
            f"all {len(rejections)} actions were rejected {how}, so nothing shows that any "
            f"action is accepted: {shown}"
        )
    if not raised or subject.env.step_exception == "unusable":
        return Result.OK, f"{what}, as unusable replies are: {shown}"
    return Result.WARN, (
        f"{what}, {len(raised)} by an exception, which makes an episode of a run fail; answer "
        "unusable actions with an observation, or, if the action is at fault, set "
        f"env.step_exception=unusable: {shown}"
    )


async def _state(subject: EnvironmentUnderTest, session: Session) -> tuple[Result, str]:
    await reset(session, subject.task(0), subject.env)
    before = await session.state(subject.env.step_timeout_s)
    is_taken = False
    with suppress(StepRejectedError):
        await session.step(await _random_action(subject), subject.env.step_timeout_s)
        is_taken = True
    after = await session.state(subject.env.step_timeout_s)
    if missing := {"episode_id", "step_count"} - set(after):
        return Result.WARN, f"has no {', '.join(sorted(missing))}"
    if is_taken and after["step_count"] == before["step_count"]:
        return Result.WARN, f"step_count stays {after['step_count']} after a step"
    return Result.OK, f"step_count {before['step_count']}, then {after['step_count']}"


async def _bad_action(subject: EnvironmentUnderTest, session: Session) -> tuple[Result, str]:
    task = subject.task(0)
    await reset(session, task, subject.env)
    try:
        await session.step(UNKNOWN_FIELD, subject.env.step_timeout_s)
    except StepRejectedError as rejection:
        await session.state(subject.env.step_timeout_s)
        if rejection.code == "VALIDATION_ERROR":
            return Result.OK, "an unknown field is a VALIDATION_ERROR, and the session continues"
        return Result.WARN, f"an unknown field is answered with {rejection!s:.200}"
    return Result.WARN, f"an unknown field is accepted as an action of {task.id}"


async def _unknown_message(subject: EnvironmentUnderTest, session: Session) -> tuple[Result, str]:
    try:
        await session.ask("no_such_type", "observation", {}, subject.env.step_timeout_s)
    except StepRejectedError as rejection:
        result = Result.OK if rejection.code == "UNKNOWN_TYPE" else Result.WARN
        return result, f"an unknown type of message is answered with {rejection.code}"
    return Result.WARN, "an unknown type of message is answered as if it were known"


async def _before_reset(subject: EnvironmentUnderTest, session: Session) -> tuple[Result, str]:
    try:
        result = await session.step(await _random_action(subject), subject.env.step_timeout_s)
    except StepRejectedError as rejection:
        return Result.OK, f"rejected: {rejection.code}"
    if result.reward:
        return Result.WARN, f"is rewarded with {result.reward:g} although there is no episode"
    return Result.OK, "answered with done" if result.done else "answered without a reward"


async def _after_done(subject: EnvironmentUnderTest, session: Session) -> tuple[Result, str]:
    """Repeat the last action after the end of episodes, then act at random: is it rewarded?"""
    answer = None
    for index in range(NUM_PLAYS):
        play = await subject.play(session, index, subject.best)
        if play.done and not play.actions:
            answer = "not tried, because episodes are done at their reset"
        if not (play.done and play.actions):
            continue
        others = [await _random_action(subject, seed) for seed in range(NUM_PLAYS)]
        for action in (play.actions[-1], *others):
            try:
                again = await session.step(action, subject.env.step_timeout_s)
            except StepRejectedError as rejection:
                answer = f"rejected: {rejection.code}"
                continue
            if again.reward:
                return (
                    Result.WARN,
                    f"is rewarded with {again.reward:g}: a policy could keep acting to earn more",
                )
            if not again.done:
                return Result.WARN, "continues as if the episode had not ended"
            answer = "answered with done and no reward"
    if answer is None:
        turns = f"within {subject.env.max_turns} turns"
        return Result.WARN, f"not tested: no episode of {NUM_PLAYS} was done {turns}"
    return Result.OK, answer


async def _random_action(subject: EnvironmentUnderTest, seed: int = 0) -> Action:
    return (await awaited(subject.choosers["random"]([], random.Random(seed))))[0]


PROBES: dict[str, Callable[[EnvironmentUnderTest, Session], Awaitable[tuple[Result, str]]]] = {
    "reset": _reset,
    "step": _step,
    "state": _state,
    "bad action": _bad_action,
    "unknown message": _unknown_message,
    "step before reset": _before_reset,
    "step after done": _after_done,
}
