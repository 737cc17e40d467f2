"""Rules about `trainer`, the model that it trains, and the devices that it trains on."""

from typing import TYPE_CHECKING

from openenv_pipe.config.rules.reward import transformed
from openenv_pipe.config.rules.rule import MAX_PRODUCT, Rule

if TYPE_CHECKING:
    from openenv_pipe.config.schema.run import RunConfig


def _baseline(config: "RunConfig") -> str | None:
    """Return trainer.advantage.baseline; None for advantages of another type."""
    advantage = config.trainer.advantage
    return advantage.baseline if advantage.type == "group_relative" else None


def _scale(config: "RunConfig") -> str | None:
    """Return trainer.advantage.scale; None for advantages of another type."""
    advantage = config.trainer.advantage
    return advantage.scale if advantage.type == "group_relative" else None


def _lacks_scripted_policy(config: "RunConfig") -> bool:
    warm_start = config.trainer.warm_start
    is_scripted = warm_start.source.type == "scripted"
    return warm_start.steps > 0 and is_scripted and not warm_start.source.scripted_policy


def _has_teacher(config: "RunConfig") -> bool:
    return config.trainer.loss.kl.coef > 0 and config.trainer.loss.kl.reference is not None


def _has_hint(config: "RunConfig") -> bool:
    return config.trainer.loss.kl.used_hint is not None


def _learns_nothing(config: "RunConfig") -> bool:
    loss = config.trainer.loss
    has_teacher = _has_teacher(config) or _has_hint(config)
    has_other_terms = has_teacher or config.trainer.replay is not None
    return loss.policy_coef == loss.entropy_coef == loss.echo_coef == 0 and not has_other_terms


RULES = (
    Rule(
        keys=("trainer.tasks_per_step", "trainer.group_size"),
        breaks=lambda c: c.trainer.tasks_per_step * c.trainer.group_size > MAX_PRODUCT,
        advice=f"a step has at most {MAX_PRODUCT:,} episodes; lower one of them",
    ),
    Rule(
        keys=("trainer.warm_start.steps", "trainer.warm_start.source.policy"),
        breaks=_lacks_scripted_policy,
        advice="this warm start imitates a scripted policy; set "
        "trainer.warm_start.source.policy=module:name, choose another "
        "trainer/warm_start/source=NAME, or set trainer.warm_start.steps=0",
    ),
    Rule(
        keys=("trainer.max_sampling_rounds", "trainer.advantage.type"),
        breaks=lambda c: c.trainer.max_sampling_rounds > 1 and c.trainer.advantage.type == "python",
        advice="only group_relative advantages tell which groups have no signal; set "
        "trainer.max_sampling_rounds=1",
    ),
    Rule(
        keys=("trainer.max_sampling_rounds", "trainer.advantage.baseline"),
        breaks=lambda c: c.trainer.max_sampling_rounds > 1 and _baseline(c) == "batch",
        advice="rounds replace groups whose rewards are all equal, and such groups do have a "
        "signal when compared with all others; set trainer.max_sampling_rounds=1",
    ),
    Rule(
        keys=("trainer.max_sampling_rounds", "trainer.loss.normalise_groups"),
        breaks=lambda c: (
            c.trainer.max_sampling_rounds > 1 and c.trainer.loss.normalise_groups == "all"
        ),
        advice="rounds replace groups without a signal, and the loss would be a mean over these "
        "as well; set trainer.loss.normalise_groups=with_signal or trainer.max_sampling_rounds=1",
    ),
    Rule(
        keys=("trainer.advantage.baseline", "trainer.advantage.scale"),
        breaks=lambda c: _baseline(c) == "batch" and _scale(c) == "group",
        advice="rewards would be compared over all groups and scaled group by group; set "
        "trainer.advantage.scale=batch or none",
    ),
    Rule(
        keys=("reward.transforms.*", "trainer.advantage.scale"),
        breaks=lambda c: transformed(c, "multiply") if _scale(c) == "terms" else [],
        advice="GDPO adds up terms, and a gate multiplies them; remove the transform multiply, or "
        "set another trainer.advantage.scale",
    ),
    Rule(
        keys=("trainer.max_sampling_rounds", "trainer.advantage.scale"),
        breaks=lambda c: c.trainer.max_sampling_rounds > 1 and _scale(c) == "terms",
        advice="rounds replace groups whose rewards are all equal, although their terms may "
        "differ; set trainer.max_sampling_rounds=1",
    ),
    Rule(
        keys=("trainer.max_sampling_rounds", "trainer.advantage.scale"),
        breaks=lambda c: c.trainer.max_sampling_rounds > 1 and _scale(c) == "batch",
        advice="rounds replace groups whose rewards are all equal, and these would lower the "
        "standard deviation of the step; set trainer.max_sampling_rounds=1",
    ),
    Rule(
        keys=("trainer.advantage.scale", "trainer.advantage.baseline"),
        breaks=lambda c: _scale(c) in ("mean", "terms") and _baseline(c) != "group",
        advice="MaxRL and GDPO subtract the group's mean; set trainer.advantage.baseline=group or "
        "another trainer.advantage.scale",
    ),
    Rule(
        keys=("trainer.loss.type", "trainer.loss.normalise"),
        breaks=lambda c: c.trainer.loss.type == "gspo" and c.trainer.loss.normalise != "sample",
        advice="GSPO has one ratio per sample, which would count once for each token; set "
        "trainer.loss.normalise=sample",
    ),
    Rule(
        keys=("trainer.loss.max_ratio", "trainer.loss.type"),
        breaks=lambda c: c.trainer.loss.type == "cispo" and c.trainer.loss.max_ratio is not None,
        advice="CISPO bounds all ratios by trainer.loss.clip_high; set trainer.loss.max_ratio=null",
    ),
    Rule(
        keys=("trainer.loss.max_ratio", "trainer.loss.clip_high"),
        breaks=lambda c: (
            c.trainer.loss.type in ("grpo", "gspo")
            and c.trainer.loss.max_ratio is not None
            and c.trainer.loss.max_ratio <= 1.0 + c.trainer.loss.clip_high
        ),
        advice="ratios with positive advantages may reach 1 + clip_high, and max_ratio, which "
        "bounds the others, has to be higher; raise trainer.loss.max_ratio, or set it to null",
    ),
    Rule(
        keys=("trainer.loss.kl.estimator", "trainer.loss.kl.importance_weights"),
        breaks=lambda c: (kl := c.trainer.loss.kl).estimator == "k1" and not kl.importance_weights,
        advice="its gradient is zero on average; set "
        "trainer.loss.kl.importance_weights=true, or trainer.loss.kl.estimator=k2 or k3",
    ),
    Rule(
        keys=("trainer.loss.kl.reference", "trainer.loss.kl.refresh_every"),
        breaks=lambda c: _has_teacher(c) and c.trainer.loss.kl.refresh_every is not None,
        advice="the policy would take the teacher's place; set trainer.loss.kl.refresh_every=null",
    ),
    Rule(
        keys=("beside.*.teacher", "trainer.loss.kl.reference"),
        breaks=lambda c: [
            name
            for name, each in c.beside.items()
            if each.teacher is not None and c.trainer.loss.kl.reference is None
        ],
        advice="env has no teacher; set trainer.loss.kl.reference to its own",
    ),
    Rule(
        keys=("trainer.loss.kl.estimator", "trainer.loss.kl.reference"),
        breaks=lambda c: (
            c.trainer.loss.kl.estimator == "exact" and not _has_teacher(c) and not _has_hint(c)
        ),
        advice="only the divergence to a teacher is computed over the vocabulary; set "
        "trainer.loss.kl.reference and trainer.loss.kl.coef, or trainer.loss.kl.estimator=k3",
        when="train",
    ),
    Rule(
        keys=("trainer.loss.kl.reference", "trainer.loss.kl.estimator"),
        breaks=lambda c: (kl := c.trainer.loss.kl).has_served_teacher and kl.estimator == "exact",
        advice="a server gives logprobs of the sampled tokens only; set "
        "trainer.loss.kl.estimator=k2 and trainer.loss.kl.importance_weights=false",
    ),
    Rule(
        keys=("trainer.loss.kl.reference", "trainer.temperature"),
        breaks=lambda c: c.trainer.loss.kl.has_served_teacher and c.trainer.temperature != 1.0,
        advice="a server's logprobs are those at temperature 1; set trainer.temperature=1",
    ),
    Rule(
        keys=("trainer.loss.kl.reference", "trainer.loss.normalise_groups"),
        breaks=lambda c: _has_teacher(c) and c.trainer.loss.normalise_groups == "with_signal",
        advice="a teacher teaches in all groups, including those whose rewards are all equal; set "
        "trainer.loss.normalise_groups=all",
    ),
    Rule(
        keys=("trainer.loss.kl.reference", "trainer.devices"),
        breaks=lambda c: _has_teacher(c) and c.trainer.devices > 1,
        advice="a teacher is not supported on several devices; set trainer.devices=1",
    ),
    Rule(
        keys=("trainer.loss.kl.hint", "trainer.loss.kl.reference"),
        breaks=lambda c: _has_hint(c) and _has_teacher(c),
        advice="with a hint, the policy itself is the teacher; set one of them to null",
    ),
    Rule(
        keys=("trainer.loss.kl.hint", "trainer.loss.kl.refresh_every"),
        breaks=lambda c: _has_hint(c) and c.trainer.loss.kl.refresh_every is not None,
        advice="with a hint, the present policy is the teacher at every step; set "
        "trainer.loss.kl.refresh_every=null",
    ),
    Rule(
        keys=("trainer.loss.kl.hint", "trainer.loss.normalise_groups"),
        breaks=lambda c: (
            c.trainer.loss.kl.used_hint == "feedback"
            and c.trainer.loss.normalise_groups == "with_signal"
        ),
        advice="feedback teaches in all groups, including those whose rewards are all equal; set "
        "trainer.loss.normalise_groups=all",
    ),
    Rule(
        keys=("trainer.loss.kl.hint", "trainer.loss.kl.estimator"),
        breaks=lambda c: _has_hint(c) and c.trainer.loss.kl.estimator == "exact",
        advice="with a hint, the divergence is estimated from the sampled tokens; set "
        "trainer.loss.kl.estimator=k2 and trainer.loss.kl.importance_weights=false",
    ),
    Rule(
        keys=("trainer.loss.kl.hint", "agent"),
        breaks=lambda c: _has_hint(c) and not c.agent.is_loop,
        advice="it is not known where a hint belongs in another agent's prompts; set agent=loop or "
        "trainer.loss.kl.hint=null",
    ),
    Rule(
        keys=("trainer.loss.echo_coef", "trainer.loss.normalise_groups"),
        breaks=lambda c: (
            c.trainer.loss.echo_coef > 0 and c.trainer.loss.normalise_groups == "with_signal"
        ),
        advice="the environment's tokens teach in all groups, including those whose rewards are "
        "all equal; set trainer.loss.normalise_groups=all",
    ),
    Rule(
        keys=("trainer.loss.echo_coef", "env.max_turns"),
        breaks=lambda c: c.trainer.loss.echo_coef > 0 and c.env.max_turns == 1,
        advice="after the only reply, the model reads no token of the environment; set "
        "trainer.loss.echo_coef=0",
    ),
    Rule(
        keys=("trainer.loss.echo_coef", "agent"),
        breaks=lambda c: c.trainer.loss.echo_coef > 0 and not c.agent.is_loop,
        advice="it is not known which tokens of another agent's prompts the environment wrote; set "
        "agent=loop or trainer.loss.echo_coef=0",
    ),
    Rule(
        keys=("trainer.replay.per_step", "trainer.replay.size"),
        breaks=lambda c: (replay := c.trainer.replay) is not None and replay.per_step > replay.size,
        advice="there are never that many episodes to draw from; lower trainer.replay.per_step, or "
        "raise trainer.replay.size",
    ),
    Rule(
        keys=("reward.terms.*", "trainer.replay"),
        breaks=lambda c: c.reward.relative if c.trainer.replay is not None else [],
        advice="it only compares the episodes of a group, so that no episode is known to be better "
        "than one of another step; set trainer.replay=null, or use rewards that mean the same in "
        "all groups",
    ),
    Rule(
        keys=("trainer.loss.policy_coef", "trainer.loss.kl.coef", "trainer.loss.kl.reference"),
        breaks=_learns_nothing,
        advice="no term of the loss is left that teaches anything; set trainer.loss.policy_coef=1, "
        "or trainer.loss.kl.coef=1 and trainer.loss.kl.reference to a teacher, such as "
        "RUN/checkpoints/best",
        when="train",
    ),
    Rule(
        keys=("trainer.loss.correction.low", "trainer.loss.correction.high"),
        breaks=lambda c: not c.trainer.loss.correction.low < 1.0 < c.trainer.loss.correction.high,
        advice="a weight of 1 means that sampler and policy agree; set low < 1 < high",
    ),
    Rule(
        keys=("trainer.optimizer.type", "trainer.parallel"),
        breaks=lambda c: c.trainer.is_sharded and c.trainer.optimizer.type != "adamw",
        advice="it needs whole matrices, and each device would hold only a part; set "
        "trainer.optimizer.type=adamw or trainer.parallel=data",
    ),
    Rule(
        keys=("trainer.warm_start.optimizer.type", "trainer.parallel"),
        breaks=lambda c: (
            c.trainer.is_sharded
            and c.trainer.warm_start.steps > 0
            and c.trainer.warm_start.optimizer.type != "adamw"
        ),
        advice="it needs whole matrices, and each device would hold only a part; set "
        "trainer.warm_start.optimizer.type=adamw or trainer.parallel=data",
        when="train",
    ),
    Rule(
        keys=("trainer.guard", "trainer.checkpoint.best"),
        breaks=lambda c: c.trainer.guard == "back" and c.trainer.checkpoint.best is None,
        advice="no checkpoint is chosen as the best; set trainer.checkpoint.best.metric and "
        "trainer.checkpoint.best.direction, or trainer.guard=stop",
    ),
    Rule(
        keys=("trainer.guard", "trainer.max_staleness", "trainer.devices"),
        breaks=lambda c: (
            c.trainer.guard == "back" and (c.trainer.max_staleness > 0 or c.trainer.devices > 1)
        ),
        advice="groups played ahead and other ranks would keep the abandoned weights; set "
        "trainer.guard=stop, or trainer.max_staleness=0 and trainer.devices=1",
    ),
    Rule(
        keys=("trainer.replicas", "trainer.parallel"),
        breaks=lambda c: c.trainer.replicas > 1 and c.trainer.parallel != "fsdp",
        advice="every device already holds the whole model; set trainer.parallel=fsdp or "
        "trainer.replicas=1",
    ),
    Rule(
        keys=("trainer.replicas", "trainer.devices"),
        breaks=lambda c: (
            (trainer := c.trainer).replicas > 1
            and (trainer.devices % trainer.replicas > 0 or trainer.devices == trainer.replicas)
        ),
        advice="each replica needs the same number of devices, at least 2; set trainer.devices to "
        "2 x {trainer.replicas} or a higher multiple of {trainer.replicas}",
    ),
    Rule(
        keys=("trainer.max_staleness", "trainer.parallel", "engine"),
        breaks=lambda c: (
            c.trainer.max_staleness > 0 and c.trainer.is_sharded and c.engine.type == "local"
        ),
        advice="playing ahead needs a second policy, but all ranks together hold one; set "
        "trainer.max_staleness=0, engine=vllm or trainer.parallel=data",
        when="train",
    ),
    Rule(
        keys=("model.quantization", "trainer.parallel"),
        breaks=lambda c: c.model.quantization != "none" and c.trainer.is_sharded,
        advice="four-bit matrices cannot be sharded; set trainer.parallel=data",
    ),
    Rule(
        keys=("model.quantization", "model.lora.rank"),
        breaks=lambda c: c.model.quantization != "none" and not c.model.lora.rank,
        advice="weights in four bits cannot be trained; set model.lora.rank above 0, 16 for "
        "example, or model.quantization=none",
    ),
    Rule(
        keys=("model.dtype", "model.lora.rank"),
        breaks=lambda c: c.model.dtype == "bfloat16" and not c.model.lora.rank,
        advice="bfloat16 would round most updates of full training to nothing; set "
        "model.dtype=float32 model.autocast=bfloat16, or a model.lora.rank",
        when="train",
    ),
    Rule(
        keys=("model.num_heads", "model.num_kv_heads"),
        breaks=lambda c: c.model.type == "tiny" and c.model.num_heads % c.model.num_kv_heads > 0,
        advice="each head of keys and values serves the same number of heads; set model.num_heads "
        "to a multiple of model.num_kv_heads",
    ),
    Rule(
        keys=("env.max_episode_tokens", "model.max_length"),
        breaks=lambda c: c.model.type == "tiny" and c.env.max_episode_tokens > c.model.max_length,
        advice="an episode could have more tokens than the model has positions; lower "
        "env.max_episode_tokens, or raise model.max_length",
    ),
)
