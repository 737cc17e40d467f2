"""Rules about `env` and its tasks, `host`, `agent` and `eval`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from openenv_pipe.config.rules.rule import MAX_PRODUCT, Moment, Rule
from openenv_pipe.registry import if_command

if TYPE_CHECKING:
    from openenv_pipe.config.schema.run import RunConfig

POLICY, UNTRAINED = "policy", "untrained"  # roles that the trained model plays
MAX_RESAMPLED = 10**8  # tasks drawn in all resamples of the bootstrap


def _splits_share_tasks(config: "RunConfig") -> bool:
    """Return whether two ranges overlap; other types are checked when their rows are known."""
    train, evaluation = config.env.tasks.train, config.env.tasks.eval
    return (
        train.type == "range"
        and evaluation.type == "range"
        and train.reset == evaluation.reset
        and train.seed_start < evaluation.seed_start + evaluation.num_tasks
        and evaluation.seed_start < train.seed_start + train.num_tasks
    )


def _lacks_environment(config: "RunConfig") -> bool:
    return config.agent.needs_environment and not config.host.has_environment


def _unmeasured_terms(config: "RunConfig") -> list[str]:
    """Return the terms that only compare episodes, so that evaluations measure no reward."""
    num_samples = config.eval.during.samples_per_task or config.eval.samples_per_task
    return config.reward.relative if num_samples == 1 else config.reward.standardised


def _stops_by_unmeasured_reward(config: "RunConfig") -> list[str]:
    stop = config.eval.during.stop
    is_used = stop.at is not None and stop.measure == "reward"
    return _unmeasured_terms(config)[:1] if is_used else []


def _keeps_best_by_unmeasured_reward(config: "RunConfig") -> list[str]:
    best = config.trainer.checkpoint.best
    is_used = best is not None and best.metric == "eval/reward"
    return _unmeasured_terms(config)[:1] if is_used else []


def _has_no_interval(config: "RunConfig") -> bool:
    during = config.eval.during
    num_tasks = during.num_tasks or config.eval.num_tasks
    return during.stop.at is not None and during.stop.bound == "low" and num_tasks == 1


def _roles_that_nobody_plays(config: "RunConfig") -> list[str]:
    """Return the players whose role is neither the model's nor a name of env.baselines."""
    known = {POLICY, UNTRAINED, *config.env.baselines}
    players = config.env.players
    return [name for name, role in players.roles.items() if role not in known] if players else []


def _has_unknown_opponent(config: "RunConfig") -> bool:
    opponent, env = config.eval.opponent, config.env
    return opponent is not None and (
        env.players is None or not (opponent in env.baselines or "/" in opponent)
    )


def _league_has_no_seat(config: "RunConfig") -> bool:
    """Return whether there is a league, but the model has no second player for its members."""
    players = config.env.players
    roles = players.roles.values() if players else ()
    num_own = sum(role in (POLICY, UNTRAINED) for role in roles)
    return config.env.league is not None and num_own < 2


def _of_earlier_weights(
    key: str, breaks: Callable[["RunConfig"], bool], otherwise: str, when: Moment
) -> tuple[Rule, Rule]:
    """Return the rules for a setting by which earlier weights play against the policy."""
    return (
        Rule(
            keys=(key, "engine"),
            breaks=lambda c: breaks(c) and not c.engine.samples_in_process,
            advice="this engine has only the policy's current weights; set engine=local, or "
            f"{otherwise}",
            when=when,
        ),
        Rule(
            keys=(key, "trainer.parallel"),
            breaks=lambda c: breaks(c) and c.trainer.is_sharded,
            advice=f"earlier weights are not sharded; set trainer.parallel=data, or {otherwise}",
            when=when,
        ),
    )


NOT_MEASURED = (
    "the term's values compare the episodes of a group, so evaluations do not measure the reward; "
    "use success, or, for a term that is not standardised, set eval.samples_per_task=2 or more"
)
WITH_SERVED = "with the model that `openenv-pipe serve RUN` or `serve RUN@start` serves"

RULES = (
    Rule(
        keys=("beside", "agent"),
        breaks=lambda c: bool(c.beside) and not c.agent.is_loop,
        advice="programs and clients play one environment; set agent=loop, or leave beside out",
    ),
    Rule(
        keys=("beside", "cluster"),
        breaks=lambda c: bool(c.beside) and c.cluster.plays_on_nodes,
        advice="the workers of a cluster play one environment; set cluster=local",
    ),
    Rule(
        keys=("beside", "env.name"),
        breaks=lambda c: c.env.name in c.beside,
        advice="metrics could not tell the two apart; give the one in beside another name",
    ),
    Rule(
        keys=("env.players.roles.*", "env.baselines"),
        breaks=_roles_that_nobody_plays,
        advice=f"a player is played by {POLICY}, by {UNTRAINED}, or by a policy of env.baselines; "
        "name one of these, or add it there",
    ),
    Rule(
        keys=("env.players.roles",),
        breaks=lambda c: c.env.players is not None and not c.env.players.trained,
        advice=f"nobody is trained; give a player the role {POLICY}",
    ),
    Rule(
        keys=("eval.opponent", "env.players", "env.baselines"),
        breaks=_has_unknown_opponent,
        advice="an opponent is a policy of env.baselines or the folder of a checkpoint, such as "
        "RUN/checkpoints/step_000100, in a game with env.players; name one, or set "
        "eval.opponent=null",
    ),
    *_of_earlier_weights(
        "eval.opponent",
        lambda c: c.opponent_checkpoint is not None,
        "name a policy of env.baselines",
        "always",
    ),
    Rule(
        keys=("env.players.league", "env.players.roles"),
        breaks=_league_has_no_seat,
        advice="an earlier version of the policy plays one of its players, against it; give two "
        f"players the role {POLICY}, or set env.players.league=null",
        when="train",
    ),
    *_of_earlier_weights(
        "env.players.league", lambda c: c.env.league is not None, "env.players.league=null", "train"
    ),
    Rule(
        keys=("env.players", "agent"),
        breaks=lambda c: c.env.players is not None and not c.agent.is_loop,
        advice="programs and clients play alone; set agent=loop",
    ),
    Rule(
        keys=("env.players", "cluster"),
        breaks=lambda c: c.env.players is not None and c.cluster.plays_on_nodes,
        advice="games are not played on other machines; set cluster=local",
    ),
    Rule(
        keys=("env.players", "env.adapter.type"),
        breaks=lambda c: c.env.players is not None and c.env.adapter.type == "tool",
        advice="tools are listed by a step, which would be a move of the game; set "
        "env.adapter.type=json or text",
    ),
    Rule(
        keys=("env.tasks.train", "env.tasks.eval"),
        breaks=_splits_share_tasks,
        advice="the splits share tasks, because their seeds overlap and their reset keywords are "
        "equal; move env.tasks.eval.seed_start or give each a split keyword",
    ),
    Rule(
        keys=("eval.num_tasks", "env.tasks.eval.num_tasks"),
        breaks=lambda c: (  # The size of other types is known once they are read.
            c.env.tasks.eval.type == "range" and c.eval.num_tasks > c.env.tasks.eval.num_tasks
        ),
        advice="there are not that many tasks; lower the first, or raise the second",
    ),
    Rule(
        keys=("host", "agent"),
        breaks=lambda c: c.trainer.steps > 0 and _lacks_environment(c),
        advice="without an environment only clients and Harbor can play; set agent=client, "
        "agent=harbor, another host, or trainer.steps=0 for a run of supervised steps alone"
        + if_command("serve", f"; an agent of your own plays {WITH_SERVED}"),
    ),
    Rule(
        keys=("host", "agent"),
        breaks=_lacks_environment,
        advice="an evaluation plays in an environment; set env=NAME and host=process",
        when="eval",
    ),
    Rule(
        keys=("host", "trainer.warm_start.source", "trainer.warm_start.steps"),
        breaks=lambda c: (
            not c.host.has_environment
            and c.trainer.warm_start.source.plays
            and c.trainer.warm_start.steps > 0
        ),
        advice="what the warm start imitates is played in an environment; set "
        "trainer.warm_start.steps=0",
    ),
    Rule(
        keys=("host", "env.tasks.train.type"),
        breaks=lambda c: not c.host.has_environment and c.env.tasks.train.type == "server",
        advice="no server lists tasks; set another type",
    ),
    Rule(
        keys=("host", "env.tasks.eval.type"),
        breaks=lambda c: not c.host.has_environment and c.env.tasks.eval.type == "server",
        advice="no server lists tasks; set another type",
    ),
    Rule(
        keys=("agent.host", "agent.token"),
        breaks=lambda c: c.agent.is_open,
        advice="other machines could open episodes; set the environment variable "
        "OPENENV_PIPE_TOKEN, or agent.host=127.0.0.1",
        when="play",
    ),
    Rule(
        keys=("agent", "eval.during.every"),
        breaks=lambda c: not c.agent.plays_on_demand and c.eval.during.every > 0,
        advice="clients play no evaluations; set eval.during.every=0",
        when="train",
    ),
    Rule(
        keys=("agent", "host"),
        breaks=lambda c: not (c.agent.plays_on_demand or c.host.has_environment),
        advice="clients play no evaluations, and without an environment nothing else does"
        + if_command("serve", f"; measure your agent {WITH_SERVED}"),
        when="eval",
    ),
    Rule(
        keys=("agent",),
        breaks=lambda c: not c.agent.plays_on_demand and c.host.has_environment,
        advice="clients play no evaluations; name what plays instead, such as agent=loop or "
        "agent=program",
        when="eval",
    ),
    Rule(
        keys=("eval.greedy", "eval.temperature"),
        breaks=lambda c: c.eval.greedy and not c.eval.temperature,
        advice="greedy adds a row at temperature 0, which all rows have already; set "
        "eval.temperature, such as 1.0, or eval.greedy=false",
    ),
    Rule(
        keys=("eval.num_tasks", "eval.samples_per_task"),
        breaks=lambda c: c.eval.num_tasks * c.eval.samples_per_task > MAX_PRODUCT,
        advice=f"an evaluation has at most {MAX_PRODUCT:,} episodes; lower one of them",
    ),
    Rule(
        keys=("eval.num_resamples", "eval.num_tasks"),
        breaks=lambda c: c.eval.num_resamples * c.eval.num_tasks > MAX_RESAMPLED,
        advice=f"their product is at most {MAX_RESAMPLED:,}; lower one of them",
    ),
    Rule(
        keys=("eval.during.num_tasks", "eval.num_tasks"),
        breaks=lambda c: (c.eval.during.num_tasks or 0) > c.eval.num_tasks,
        advice="evaluations during training play some of these tasks; lower the first key, or "
        "raise the second",
    ),
    Rule(
        keys=("eval.during.stop.at", "eval.during.every"),
        breaks=lambda c: c.eval.during.stop.at is not None and not c.eval.during.every,
        advice="there are no evaluations during training; set eval.during.every to a number of "
        "steps",
    ),
    Rule(
        keys=("eval.during.stop.bound", "eval.during.num_tasks", "eval.num_tasks"),
        breaks=_has_no_interval,
        advice="an interval needs at least two tasks; set more, or eval.during.stop.bound=mean",
    ),
    Rule(
        keys=("trainer.checkpoint.best.metric", "eval.during.every"),
        breaks=lambda c: c.trainer.checkpoint.best_by_evaluations and not c.eval.during.every,
        advice="there are no evaluations during training; set eval.during.every to a number of "
        "steps",
    ),
    Rule(
        keys=("eval.during.stop.measure", "reward.terms.*"),
        breaks=_stops_by_unmeasured_reward,
        advice=NOT_MEASURED,
    ),
    Rule(
        keys=("trainer.checkpoint.best.metric", "reward.terms.*"),
        breaks=_keeps_best_by_unmeasured_reward,
        advice=NOT_MEASURED,
    ),
)
