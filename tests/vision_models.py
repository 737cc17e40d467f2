"""Small vision-language models of random weights, as folders that `model=hub` reads."""

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from openenv_pipe.models.tiny import build_tokenizer

MARKERS = ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"]
PATCH = 4  # pixels; four patches are one token
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
    },
    "initializer_range": 0.15,
}
VISION = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.15}
QWEN2_VISION = {**VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
QWEN2_5_VISION = {
    **VISION,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [1],
}


def write_vision_model(folder: Path, kind: str = "qwen2_vl", *, max_pixels: int = 1024) -> Path:
    """Write a model, its tokenizer and its picture processor, and return the folder.

    max_pixels: to which larger pictures are shrunk; a token takes 64.
    """
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=True) for each in MARKERS])
    start, picture, video, end = tokenizer.convert_tokens_to_ids(MARKERS)
    special = {
        "image_token_id": picture,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    text = TEXT | {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    if kind == "qwen2_vl":
        config = Qwen2VLConfig(
            text_config=text, vision_config=QWEN2_VISION, tie_word_embeddings=True, **special
        )
        model = Qwen2VLForConditionalGeneration(config)
    else:
        config = Qwen2_5_VLConfig(
            text_config=text, vision_config=QWEN2_5_VISION, tie_word_embeddings=True, **special
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
