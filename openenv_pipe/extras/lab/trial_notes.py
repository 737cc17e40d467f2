"""What `env inspect` says of an environment that it has tried: its verdict, and notes."""

from collections.abc import Iterator

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.adapters.json import without_metadata
from openenv_pipe.environments.adapters.templates import observation_text
from openenv_pipe.environments.client.protocol import is_wrong_return
from openenv_pipe.environments.schemas import Schema
from openenv_pipe.extras.lab.check.rewards import unusable_penalty
from openenv_pipe.extras.lab.episodes import is_complaint
from openenv_pipe.extras.lab.trial import Trial
from openenv_pipe.rollout.collector import done_at_reset

MAX_SHOWN = 400  # characters of an observation or an error in a message


def notes_of(trial: Trial, env: EnvConfig) -> Iterator[str]:
    """Say what a user should know, in whole sentences."""
    first = _short(observation_text(trial.firsts[0]))
    if is_complaint(trial.firsts[0]):
        yield (
            f"the first observation reads like a complaint: {first}; reset may need keywords "
            "(env.tasks.train.reset), or the server data or a key (env.variables)"
        )
    else:
        yield f"a task begins with {first}"
    if trial.mean_reward < 0.0:
        yield (
            f"random actions earn {trial.mean_reward:.3g} an episode of up to "
            f"{max(play.num_turns for play in trial.plays)} turns, and never acting earns 0, so "
            "GRPO would learn not to act; the experiment therefore has the reward term `unusable`, "
            f"which takes {unusable_penalty(trial.plays):g} for each unusable reply"
        )
    if trial.exceptions and (trial.num_actions or env.step_exception == "unusable"):
        yield (
            f"{len(trial.exceptions)} of {trial.num_actions + len(trial.rejections)} random "
            "actions "
            "raised on the server, which step_exception: unusable takes as the model's mistakes: "
            f"{_short(str(trial.exceptions[0]))}"
        )
    if trial.num_actions and not trial.has_rewards:
        yield "no step had a reward (it was always null); the reward has to come from reward.terms"
    if trial.are_tasks_alike and len(trial.firsts) > 1:
        yield (
            f"the first observations of {len(trial.firsts)} tasks are the same: the environment "
            "may ignore the seed, or need keywords (env.tasks.train.reset) that tell tasks apart"
        )
    if trial.failure is not None:
        yield f"a random episode failed: {_short(str(trial.failure))}"


def problem_of(trial: Trial, env: EnvConfig, action: Schema) -> str | None:
    """Return why a model cannot be trained; None if it can."""
    if trial.is_done_at_once:
        return done_at_reset(trial.firsts[0])
    if not trial.tools and not without_metadata(action).get("properties"):
        return (
            "the environment's action has no fields, and the server lists no tools: there is "
            "nothing that a model could choose"
        )
    if trial.num_actions:
        return None
    if trial.failure is not None:
        return f"no step is answered: {_short(str(trial.failure))}"
    rejection = trial.rejections[0]
    how = "all raised on the server"
    advice = ""
    if not trial.exceptions:
        how = "none is valid for the server, although its own schema allows them"
    elif not is_wrong_return(rejection):
        if env.step_exception == "unusable":
            return None  # The user says that such actions are the model's mistakes.
        advice = (
            "; if other actions are legal there, say so by env.step_exception=unusable, and the "
            "model has to find them"
        )
    return f"of {len(trial.rejections)} random actions, {how}: {_short(str(rejection))}{advice}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
