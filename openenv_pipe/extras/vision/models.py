"""The vision-language models that can be trained, and the settings that do not go with them."""

from collections.abc import Callable
from typing import Any

from openenv_pipe.config.rules.rule import Rule
from openenv_pipe.config.schema import HubModelConfig, RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.vision import ImageFormat, Vision


class QwenVision(Vision):
    """Qwen2-VL and Qwen2.5-VL. What imports Pillow, which few runs need, is imported when used."""

    model_types = ("qwen2_vl", "qwen2_5_vl")
    vision_modules = r"(.*\.)?visual\..*"

    def load_images(self, config: HubModelConfig, found: Any, tokenizer: Any) -> ImageFormat:
        from openenv_pipe.extras.vision.image_format import QwenImages

        return QwenImages(config, found, tokenizer)

    def make_policy(self, model: Any, chat: ChatFormat, **options: Any) -> Policy:
        from openenv_pipe.extras.vision.policy import VisionPolicy

        return VisionPolicy(model, chat, **options)

    def reject_unsupported(self, config: RunConfig) -> None:
        for message in (each for rule in RULES for each in rule.violations(config)):
            raise ConfigError(message)


def _unsupported(key: str, breaks: Callable[[RunConfig], bool], instead: str) -> Rule:
    return Rule(
        keys=(key,),
        breaks=breaks,
        advice=f"not supported with vision-language models, such as model.path={{model.path}}; set "
        f"{key}={instead}, or choose a model for text",
    )


RULES = (
    _unsupported("engine", lambda c: not c.engine.supports_vision, "local"),
    _unsupported("cluster", lambda c: c.cluster.plays_on_nodes, "local"),
    _unsupported("agent", lambda c: not c.agent.is_loop, "loop"),
    _unsupported("model.history", lambda c: c.model.history == "rerender", "append"),
    _unsupported("model.quantization", lambda c: c.model.quantization != "none", "none"),
    _unsupported(
        "trainer.loss.kl.reference",
        lambda c: c.trainer.loss.kl.coef > 0 and c.trainer.loss.kl.reference is not None,
        "null",
    ),
    _unsupported("trainer.loss.kl.hint", lambda c: c.trainer.loss.kl.used_hint is not None, "null"),
    _unsupported("trainer.loss.echo_coef", lambda c: c.trainer.loss.echo_coef > 0, "0"),
    _unsupported("trainer.replay", lambda c: c.trainer.replay is not None, "null"),
    _unsupported("trainer.devices", lambda c: c.trainer.devices > 1, "1"),
)
