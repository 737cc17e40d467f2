"""Rules about weights that go to vLLM servers from memory to memory."""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from openenv_pipe.config.precision import publish_mode
from openenv_pipe.config.rules.engine import option_name, sends_weights, sleeps
from openenv_pipe.config.rules.rule import Rule
from openenv_pipe.system.http import LOOPBACK

if TYPE_CHECKING:
    from openenv_pipe.config.schema.engine_vllm import VllmEngineConfig
    from openenv_pipe.config.schema.run import RunConfig

SEVERAL_GPUS = ("--tensor-parallel", "-tp", "--pipeline-parallel", "-pp")
SEVERAL_ENGINES = ("--data-parallel", "-dp")


def _has_option(engine: "VllmEngineConfig", options: tuple[str, ...]) -> bool:
    return any(option_name(each).startswith(options) for each in engine.arguments)


def _sends_adapters(config: "RunConfig") -> bool:
    sends = sends_weights(config, "broadcast", "ipc") is not None
    return sends and publish_mode(config) == "adapter"


RULES = (
    Rule(
        keys=("engine.weight_transfer", "engine.publish", "model.lora.rank"),
        breaks=_sends_adapters,
        advice="it sends all weights, but no adapter; set engine.publish=merged, or "
        "engine.weight_transfer=files",
    ),
    Rule(
        keys=("engine.weight_transfer", "engine.launch"),
        breaks=lambda c: bool(
            (e := sends_weights(c, "broadcast", "ipc")) and e.launch not in ("managed", "attach")
        ),
        advice="a server in a container is isolated from the learner; set engine.launch=managed, "
        "or engine.weight_transfer=files",
    ),
    Rule(
        keys=("engine.weight_transfer", "engine.sleep"),
        breaks=lambda c: bool(sends_weights(c, "broadcast") and sleeps(c)),
        advice="a server sleeps only for a learner on its own GPU, but broadcast reaches only "
        "other GPUs; set engine.weight_transfer=ipc or files",
    ),
    Rule(
        keys=("engine.weight_transfer", "engine.arguments"),
        breaks=lambda c: bool(
            (e := sends_weights(c, "broadcast", "ipc")) and _has_option(e, SEVERAL_ENGINES)
        ),
        advice="weights reach only one engine of a server, and these arguments start several; "
        "set engine.num_servers instead, or engine.weight_transfer=files",
    ),
    Rule(
        keys=("engine.weight_transfer", "engine.arguments"),
        breaks=lambda c: bool((e := sends_weights(c, "ipc")) and _has_option(e, SEVERAL_GPUS)),
        advice="weights reach one GPU, and these arguments divide a server over several; set "
        "engine.weight_transfer=broadcast or files",
    ),
    Rule(
        keys=("engine.weight_transfer", "engine.url"),
        breaks=lambda c: bool(
            (e := sends_weights(c, "ipc"))
            and any(urlsplit(url).hostname not in LOOPBACK for url in e.urls)
        ),
        advice="it needs servers on this machine, and one may be on another; set engine.url to "
        f"one of {', '.join(LOOPBACK)}, or engine.weight_transfer=broadcast or files",
    ),
)
