"""Every causal language model that transformers knows by its mapping, in tiny form."""

import inspect
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.forward.architecture_check import reject_unsupported
from openenv_pipe.models.forward.attention.packed import use_packed_attention
from openenv_pipe.models.policy import Policy

NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MAX_PARAMETERS = 3_000_000
# What configurations call their sizes. Each gets those that it has. Windows and chunks have 16
# tokens, so that short rows cross them.
SIZES: dict[int, str] = {
    1: "bos_token_id n_group topk_group n_groups mamba_n_groups n_shared_experts encoder_layers "
    "first_k_dense_replace zero_expert_num",
    2: "num_key_value_heads num_experts_per_tok moe_k moe_topk linear_num_key_heads mamba_expand "
    "index_n_heads altup_num_inputs swa_num_key_value_heads",
    4: "num_hidden_layers num_attention_heads n_layer num_layers n_layers n_head n_heads num_heads "
    "decoder_layers decoder_attention_heads encoder_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads time_step_rank "
    "conv_kernel eos_token_id swa_num_attention_heads",
    8: "qk_rope_head_dim mamba_n_heads n_mamba_heads mamba_num_heads rotary_dim laurel_rank",
    16: "head_dim sliding_window attention_chunk_size attention_window_size chunk_size "
    "mamba_chunk_size block_size kv_lora_rank qk_nope_head_dim v_head_dim linear_key_head_dim "
    "linear_value_head_dim linear_head_dim mamba_d_head mamba_d_state mamba_head_dim "
    "ssm_state_size state_size hidden_size_per_layer_input global_head_dim index_head_dim "
    "index_topk swa_head_dim dim_head window_size attention_head_dim rel_extent",
    24: "q_lora_rank qk_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size",
    64: "hidden_size intermediate_size d_model n_embd n_inner d_ff ffn_dim decoder_ffn_dim "
    "encoder_ffn_dim intermediate_size_mlp lru_width attention_hidden_size embedding_size dff "
    "dim_ff shape_embed_dim pronunciation_embed_dim",
    128: "mamba_d_ssm",
    261: "vocab_size vocab_size_per_layer_input unpadded_vocab_size shape_vocab_size "
    "pronunciation_vocab_size",
    512: "max_position_embeddings n_positions max_seq_len n_ctx",
}
ZEROS = ("pad_token_id", "num_kv_shared_layers", "num_nextn_predict_layers")
LATENT_MODELS = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 sarvam_mla "
    "youtu"
)
LATENT = {"num_key_value_heads": 4}  # of latent attention, each head has its own
DIFFERENT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LATENT_MODELS.split(), LATENT),
    "bamba": {"attn_layer_indices": [2]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        **LATENT,
        "q_lora_rank": None,
        "layer_types": [*3 * ["linear_attention"], "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {**LATENT, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "zamba": LATENT
    | {"attn_layer_period": 2, "attn_layer_offset": 0}
    | {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {**LATENT, "layers_block_type": 2 * ["mamba", "hybrid"], "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(name: str) -> Any:
    """Return a small configuration of the `model_type`. Raises whatever it raises."""
    kind: Any = CONFIG_MAPPING[name]
    text = getattr(kind, "sub_configs", {}).get("text_config")
    if getattr(text, "model_type", None) in CONFIG_MAPPING:
        return kind(text_config=tiny_config(text.model_type).to_dict())
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {})}
    known |= set(getattr(kind, "__dataclass_fields__", {}))
    sizes = {key: size for size, keys in SIZES.items() for key in keys.split()}
    sizes |= dict.fromkeys(ZEROS, 0)
    given: dict[str, Any] = {key: size for key, size in sizes.items() if key in known}
    if "initializer_range" in known:
        given["initializer_range"] = 0.15
    return kind(**given | DIFFERENT.get(name, {}))


def is_tiny(name: str) -> bool:
    """Return whether the sizes make a small model; some have parts with sizes of their own."""
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(tiny_config(name))
    except Exception:
        return False
    return sum(values.numel() for values in model.parameters()) <= MAX_PARAMETERS


def tiny_model(name: str) -> Any:
    """Return a model whose weights are drawn wide, so that every part has an effect."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        tiny_config(name), dtype=torch.float32
    )
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim == 1:
                values.add_(0.1 * torch.randn_like(values))
            elif values.std() < 0.1:
                values.normal_(0.0, 0.15)
    return model.eval()


def policy_of(model: Any, chat: ChatFormat, autocast: torch.dtype = torch.float32) -> Policy:
    """Return the policy of a model, as `load_policy` does. Raises ConfigError."""
    reject_unsupported(model)
    use_packed_attention(model)
    return Policy(model, chat, device=torch.device("cpu"), autocast=autocast)
