"""The model `tiny`: random weights in the Qwen3 architecture and a byte-level tokenizer.

For tests, and for machines without a model hub or a GPU. Chat markup is one token per role, so that
conversations stay short.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from openenv_pipe.config.schema import TinyModelConfig

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"

# A tool is shown by name and parameters; its result takes the place of a user's message.
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(',') }})\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>"
    "{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each byte and each of the five markers."""
    symbols = [PAD, SYSTEM, USER, ASSISTANT, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    )


def model_config(config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Return the architecture. The caller draws the weights."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        initializer_range=config.init_std,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
