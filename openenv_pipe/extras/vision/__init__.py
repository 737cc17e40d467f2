"""Vision-language models like Qwen2-VL: `model.path` may be one."""

from openenv_pipe.registry import Extra

EXTRA = Extra(name="vision", vision="openenv_pipe.extras.vision.models:QwenVision")
