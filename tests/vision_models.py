"""Small vision-language models of random weights, as folders, and episodes that show images."""

import hashlib
import io
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from fakes import TEMPLATES
from tokenizers import AddedToken
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.types import Image

MARKERS = ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"]
PATCH = 4  # pixels; four patches are one token
TEXT = {
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
VISION = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.15}
QWEN2_VISION = {**VISION, "embed_dim": 16, "mlp_ratio": 2}
QWEN2_5_VISION = {
    **VISION,
    "hidden_size": 16,
    "intermediate_size": 24,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [1],
}
ADAPTER = {
    "type": "text",
    **TEMPLATES,
    "first": "{{ frame }} or {{ other }}? {{ text }}",
    "following": "{{ frame }}",
    "unusable": "? {{ why }}",
    "pattern": r"(?s)^(?P<text>.*)$",
}


def write_vision_model(
    folder: Path, kind: str = "qwen2_vl", *, max_pixels: int = 1024, head_size: int = 16
) -> Path:
    """Write a model, its tokenizer and its image processor, and return the folder.

    max_pixels: to which larger images are shrunk; a token takes 64.
    head_size: of the two attention heads; vLLM supports no smaller one than 32 on a CPU.
    """
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=True) for each in MARKERS])
    start, image, video, end = tokenizer.convert_tokens_to_ids(MARKERS)
    special = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    width = TEXT["num_attention_heads"] * head_size
    sections = [head_size // 8, head_size * 3 // 16, head_size * 3 // 16]
    text = TEXT | {
        "hidden_size": width,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": sections,
        },
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    if kind == "qwen2_vl":
        vision = QWEN2_VISION | {"hidden_size": width}
        config = Qwen2VLConfig(
            text_config=text, vision_config=vision, tie_word_embeddings=True, **special
        )
        model = Qwen2VLForConditionalGeneration(config)
    else:
        vision = QWEN2_5_VISION | {"out_hidden_size": width}
        config = Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, tie_word_embeddings=True, **special
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=2,
        size={"shortest_edge": 64, "longest_edge": max_pixels},
    ).save_pretrained(folder)
    return folder


def image(seed: int, width: int = 24, height: int = 16) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    name = hashlib.sha256(file.getvalue()).hexdigest()[:32]
    return Image(name, width, height, file.getvalue())


def play(seed, number, action):
    """Show two images at the reset, the same one twice for odd tasks, and one at each step."""
    first, second = image(seed), image(seed + 1, 40, 9) if seed % 2 == 0 else image(seed)
    observation = {"frame": image(seed + 10 * number, 16 + 8 * number, 30)}
    if number == 0:
        observation = {"frame": first, "other": second, "text": f"seed {seed}"}
    reward = sum(map(ord, action.get("text", ""))) % 11 / 10
    return StepResult(observation, reward, done=number == 2)


def samples_of(groups):
    return [
        sample
        for group in groups
        for episode in group.episodes
        for sample in episode_samples(
            group.id, episode, [0.5 - episode.member] * len(episode.turns)
        )
    ]


def trained_logprobs(policy, samples):
    with torch.no_grad():
        return policy.logprobs(pack(samples, share=False), 1.0)[0]
