"""Rules about `reward`, and the judge that its terms ask."""

from typing import TYPE_CHECKING

from openenv_pipe.config.rules.rule import Rule

if TYPE_CHECKING:
    from openenv_pipe.config.schema.run import RunConfig

OF_EPISODES = ("standardise", "multiply")  # transforms that need one value of each episode


def transformed(config: "RunConfig", *types: str) -> list[str]:
    """Return the names of the terms with a transform of one of these types."""
    transforms = config.reward.transforms
    return [name for name in transforms if any(each.type in types for each in transforms[name])]


def _empty_ranges(config: "RunConfig") -> list[str]:
    return [
        name
        for name, transforms in config.reward.transforms.items()
        for transform in transforms
        if transform.type == "clip"
        and transform.low is not None
        and transform.high is not None
        and transform.low > transform.high
    ]


RULES = (
    Rule(
        keys=("reward.terms.*.limit_tokens", "env.max_episode_tokens"),
        breaks=lambda c: [
            name
            for name, term in c.reward.terms.items()
            if term.first_token >= c.env.max_episode_tokens
        ],
        advice="every episode ends before the penalty begins; lower limit_tokens",
    ),
    Rule(
        keys=("reward.terms.*", "judge"),
        breaks=lambda c: [] if c.judge.answers else c.reward.judged,
        advice="it asks a judge, and there is none; set judge=openai, judge.base_url and "
        "judge.model",
    ),
    Rule(
        keys=("reward.transforms.*",),
        breaks=lambda c: [name for name in c.reward.transforms if name not in c.reward.terms],
        advice="there is no such term, only {reward.terms}; use the name of one of them",
    ),
    Rule(
        keys=("reward.transforms.*", "reward.terms.*.per_turn"),
        breaks=lambda c: [
            name
            for name in transformed(c, *OF_EPISODES)
            if name in c.reward.terms and c.reward.terms[name].per_turn
        ],
        advice=f"{' and '.join(OF_EPISODES)} are about whole episodes; set the term's "
        "per_turn=false",
    ),
    Rule(
        keys=("reward.transforms.*",),
        breaks=lambda c: [
            name
            for name, transforms in c.reward.transforms.items()
            if any(transform.type == "multiply" for transform in transforms[:-1])
        ],
        advice="multiply has to be the last transform",
    ),
    Rule(
        keys=("reward.transforms.*", "reward.terms.*.weight"),
        breaks=lambda c: [
            name
            for name in transformed(c, "multiply")
            if name in c.reward.terms and c.reward.terms[name].weight != 1.0
        ],
        advice="a term that multiplies has no weight of its own; set the term's weight=1.0",
    ),
    Rule(
        keys=("reward.transforms.*",),
        breaks=_empty_ranges,
        advice="the low of clip is more than its high; exchange them",
    ),
)
