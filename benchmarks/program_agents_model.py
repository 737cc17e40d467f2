"""Build a small model that calls the tools of an agent, for machines without a model hub.

The architecture is Qwen3's, with a tokenizer made here. Each reply of a given list is one token,
and a short training makes the model give one of them, whatever the prompt is. An agent therefore
goes through what it does with a model that can call tools: several calls, results, a last answer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MARKERS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
MAX_LENGTH = 32768  # system prompts of agents have up to 10,000 tokens
VOCABULARY_SIZE = 4096
NUM_STEPS, NUM_ROWS, MAX_PROMPT_LENGTH = 150, 8, 24
BEGIN = "<|im_start|>assistant\n"
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_model(folder: Path, texts: Sequence[str], replies: Mapping[str, float]) -> Path:
    """Write a model to a folder, and return the folder.

    texts: the tokenizer is made of them.
    replies: what the model says, with the probability of each.
    """
    tokenizer = _tokenizer(texts, list(replies))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    _teach(model, tokenizer, replies)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(texts: Sequence[str], replies: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(reply, normalized=False) for reply in replies])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=MARKERS[0],
        eos_token=MARKERS[2],
        additional_special_tokens=[MARKERS[1]],
        chat_template=CHAT_TEMPLATE,
    )


def _teach(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, replies: Mapping[str, float]
) -> None:
    """Train the model to give one of the replies after the beginning of an assistant's message."""
    begin = tokenizer.encode(BEGIN)
    reply_ids = torch.tensor([tokenizer.convert_tokens_to_ids(reply) for reply in replies])
    weights = torch.tensor([float(weight) for weight in replies.values()])
    # Attention stays as it was drawn, or a long prompt would hide the last token from it.
    trained = [value for name, value in model.named_parameters() if "self_attn" not in name]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)
    for _ in range(NUM_STEPS):
        length = int(torch.randint(1, MAX_PROMPT_LENGTH, ()))
        prompts = torch.randint(len(MARKERS), len(tokenizer), (NUM_ROWS, length))
        chosen = reply_ids[torch.multinomial(weights, NUM_ROWS, replacement=True)][:, None]
        ends = torch.full((NUM_ROWS, 1), tokenizer.eos_token_id)
        ids = torch.cat([prompts, torch.tensor([begin] * NUM_ROWS), chosen], dim=1)
        hidden = model.model(input_ids=ids).last_hidden_state[:, -2:]
        targets = torch.cat([chosen, ends], dim=1)
        loss = torch.nn.functional.cross_entropy(
            model.lm_head(hidden).flatten(0, 1), targets.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
