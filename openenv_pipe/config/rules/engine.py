"""Rules about `engine`, what it publishes, and the servers that it starts or attaches to."""

from typing import TYPE_CHECKING, cast

from openenv_pipe.config.precision import publish_mode
from openenv_pipe.config.rules.rule import Rule

if TYPE_CHECKING:
    from openenv_pipe.config.schema.engine_vllm import VllmEngineConfig
    from openenv_pipe.config.schema.run import RunConfig

LEVELS = ("level1", "level2")  # values of engine.sleep that free memory


def vllm_engine(config: "RunConfig") -> "VllmEngineConfig | None":
    return cast("VllmEngineConfig", config.engine) if config.engine.type == "vllm" else None


def sends_weights(config: "RunConfig", *transfers: str) -> "VllmEngineConfig | None":
    """Return the engine if it sends weights from memory to memory, in one of these ways."""
    engine = vllm_engine(config)
    return engine if engine and engine.weight_transfer in transfers else None


def option_name(argument: str) -> str:
    """Return the name of an option without its value, as vLLM's parser reads it."""
    return argument.partition("=")[0].replace("_", "-")


def sleeps(config: "RunConfig") -> "VllmEngineConfig | None":
    engine = vllm_engine(config)
    return engine if engine and engine.sleep in LEVELS else None


def _publishes_what_is_not_trained(config: "RunConfig") -> bool:
    engine = vllm_engine(config)
    if engine is None or engine.publish == "auto":
        return False
    return (engine.publish == "full") == bool(config.model.lora.rank)


RULES = (
    Rule(
        keys=("engine",),
        breaks=lambda c: not c.engine.capabilities.can_train,
        advice="it cannot train and is only for evaluation; set engine=local or engine=vllm",
        when="train",
    ),
    # The capabilities of engine=python are known only once it is imported, and reading a run's
    # configuration imports nothing.
    Rule(
        keys=("trainer.max_staleness", "engine"),
        breaks=lambda c: (
            c.trainer.max_staleness > 1
            and c.engine.capabilities.can_train
            and not c.engine.capabilities.publishes_in_flight
        ),
        advice="this engine keeps one older version of the weights; set trainer.max_staleness to "
        "0 or 1, or engine=vllm",
        when="train",
    ),
    Rule(
        keys=("agent", "engine"),
        breaks=lambda c: (
            not c.agent.is_loop
            and c.engine.capabilities.takes != "token_ids"
            and c.engine.type != "openai"
        ),
        advice="this engine cannot answer an agent's calls; set engine=local or engine=vllm, for "
        "evaluations engine=openai, or set agent=loop",
        when="play",
    ),
    Rule(
        keys=("engine.sampling.*",),
        breaks=lambda c: [*c.engine.distortions],
        advice="tokens and their logprobs would be from another distribution than the one that is "
        "trained; turn these settings off for training, they are for evaluation",
        when="train",
    ),
    Rule(
        keys=("engine.max_model_len", "env.max_episode_tokens"),
        breaks=lambda c: bool(
            (e := vllm_engine(c))
            and e.starts_servers
            and e.max_model_len < c.env.max_episode_tokens
        ),
        advice="the server would reject long episodes; raise engine.max_model_len, or lower "
        "env.max_episode_tokens",
        when="train",
    ),
    Rule(
        keys=("engine.launch", "engine.url"),
        breaks=lambda c: bool((e := vllm_engine(c)) and e.launch == "attach" and e.url is None),
        advice="it names no server; set engine.url, such as http://127.0.0.1:8000",
    ),
    Rule(
        keys=("engine.launch", "engine.num_servers"),
        breaks=lambda c: bool((e := vllm_engine(c)) and e.launch == "attach" and e.num_servers > 1),
        advice="num_servers counts servers to start; set engine.url to a list instead",
    ),
    Rule(
        keys=("engine.publish", "model.lora.rank"),
        breaks=_publishes_what_is_not_trained,
        advice="with a rank of 0 all weights are published as `full`, else `adapter` or `merged`; "
        "set engine.publish=auto",
    ),
    Rule(
        keys=("engine.sleep", "trainer.max_staleness"),
        breaks=lambda c: bool(sleeps(c) and c.trainer.max_staleness),
        advice="the server has to sample while the learner works; set engine.sleep=never, or "
        "trainer.max_staleness=0",
    ),
    Rule(
        keys=("engine.sleep", "engine.publish", "model.lora.rank"),
        breaks=lambda c: bool(
            (e := vllm_engine(c)) and e.sleep == "level2" and publish_mode(c) == "adapter"
        ),
        advice="level2 drops the base weights that adapters need; set engine.sleep=level1, or "
        "engine.publish=merged",
    ),
)
