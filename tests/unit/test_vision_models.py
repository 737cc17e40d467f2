"""Vision-language models cannot be trained, and are refused in words."""

import json

import pytest
from fakes import CPU
from test_safetensors_only import hub_model

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.load import build_empty, load_policy
from openenv_pipe.models.tiny import build_tokenizer


def test_a_vision_language_model_is_refused(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    for load in (lambda config: load_policy(config, seed=0, device=CPU), build_empty):
        with pytest.raises(ConfigError, match="vision-language model, which cannot be trained"):
            load(hub_model(tmp_path))
