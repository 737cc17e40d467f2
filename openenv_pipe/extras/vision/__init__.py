"""Vision-language models like Qwen2-VL: `model.path` may be one.

models         which models these are, and the settings that do not go with them
image_format   how a model reads images: placeholder tokens, and patches
policy         the policy whose rows have images in them
probe          compares its forward passes with the model's own
"""

from openenv_pipe.registry import Extra

EXTRA = Extra(name="vision", vision="openenv_pipe.extras.vision.models:QwenVision")
