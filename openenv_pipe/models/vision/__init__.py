"""Vision-language models like Qwen2-VL. Importing this imports Pillow, which few runs need.

image_format   how a model reads images: placeholder tokens, and patches
policy         the policy whose rows have images in them
probe          compares its forward passes with the model's own
"""

from openenv_pipe.models.vision.image_format import load_image_format
from openenv_pipe.models.vision.policy import VisionPolicy

__all__ = ["VisionPolicy", "load_image_format"]
