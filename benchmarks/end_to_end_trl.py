"""How TRL's trainer plays the game of `end_to_end.py`: all conversations of a step in one batch.

Shape letters: R conversations, Q new tokens, V vocabulary.
"""

import time
from typing import Any

import torch
from end_to_end_games import GameOf
from end_to_end_sides import GROUP_SIZE
from transformers import DynamicCache

# What follows a reply, by the token that ends it.
FOLLOW = {
    "<|end|>": "<|user|>{}<|assistant|>",
    "<|im_end|>": "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
}


class Rollout:
    """A `rollout_func` of GRPOTrainer."""

    def __init__(self, game: GameOf, *, is_cached: bool) -> None:
        self._game = game
        self._is_cached = is_cached
        self._num_tasks = 0  # that were played
        self.seconds = 0.0  # of the last rollout
        self.num_sampled = 0  # tokens of the last rollout

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        started = time.perf_counter()
        tokenizer, model = trainer.processing_class, trainer.model
        first_task, self._num_tasks = self._num_tasks, self._num_tasks + len(prompts) // GROUP_SIZE
        games = [
            self._game.start(first_task + number // GROUP_SIZE) for number in range(len(prompts))
        ]
        first = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        engine = Cached if self._is_cached else Stock
        generate = engine(model, tokenizer, len(prompts), self._game.max_reply)
        given = first
        follow = FOLLOW[tokenizer.eos_token]
        rows: list[list[int]] = [[] for _ in prompts]  # completions and what the game says
        masks: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        replies: list[list[str]] = [[] for _ in prompts]
        was_training = model.training
        model.eval()
        for turn in range(self._game.num_turns):
            with torch.inference_mode():
                sampled, chosen = generate(given)
            for row, (ids, values) in enumerate(zip(sampled, chosen, strict=True)):
                rows[row] += ids
                masks[row] += [1] * len(ids)
                logprobs[row] += values
                replies[row].append(tokenizer.decode(ids, skip_special_tokens=True))
            if turn == self._game.num_turns - 1:
                break
            texts = [game.play(said[-1]) for game, said in zip(games, replies, strict=True)]
            given = tokenizer([follow.format(text) for text in texts])["input_ids"]
            for row, ids in enumerate(given):
                if sampled[row][-1] != tokenizer.eos_token_id:  # It was cut off.
                    given[row] = ids = [tokenizer.eos_token_id, *ids]
                rows[row] += ids
                masks[row] += [0] * len(ids)
                logprobs[row] += [0.0] * len(ids)
        model.train(was_training)
        self.num_sampled = sum(map(sum, masks))
        self.seconds = time.perf_counter() - started
        return {
            "prompt_ids": first,
            "completion_ids": rows,
            "logprobs": logprobs,
            "env_mask": masks,
            "replies": replies,
        }


class Stock:
    """Replies by transformers' `generate`, from the whole conversation each time."""

    def __init__(self, model: Any, tokenizer: Any, num_rows: int, max_reply: int) -> None:
        self._model, self._tokenizer, self._max_reply = model, tokenizer, max_reply
        self._rows: list[list[int]] = [[] for _ in range(num_rows)]

    def __call__(self, new_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        rows = [[*row, *ids] for row, ids in zip(self._rows, new_ids, strict=True)]
        given = self._tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        output = self._model.generate(
            **given,
            max_new_tokens=self._max_reply,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
        )
        sampled = [
            until_end(row, self._tokenizer.eos_token_id)
            for row in output[:, given["input_ids"].shape[1] :].tolist()
        ]
        self._rows = [[*row, *ids] for row, ids in zip(rows, sampled, strict=True)]
        return sampled, [[0.0] * len(ids) for ids in sampled]


def until_end(ids: list[int], end_id: int) -> list[int]:
    return ids[: ids.index(end_id) + 1] if end_id in ids else ids


class Cached:
    """Replies from keys and values that are kept, so that only new tokens are computed."""

    def __init__(self, model: Any, tokenizer: Any, num_rows: int, max_reply: int) -> None:
        self._model, self._end_id, self._max_reply = model, tokenizer.eos_token_id, max_reply
        self._cache = DynamicCache(config=model.config)
        self._mask = torch.zeros(num_rows, 0, dtype=torch.int64)
        self._lengths = torch.zeros(num_rows, 1, dtype=torch.int64)
        self._last: list[list[int]] = [[] for _ in range(num_rows)]  # sampled, not yet computed

    def __call__(self, new_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        rows = [[*last, *ids] for last, ids in zip(self._last, new_ids, strict=True)]
        width = max(map(len, rows))
        ids_RQ = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask_RQ = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        playing_R = torch.ones(len(rows), dtype=torch.bool)
        sampled, chosen, counted = [], [], []
        while True:
            logits_RV = self._forward(ids_RQ, mask_RQ)
            logprobs_RV = torch.log_softmax(logits_RV.float(), -1)
            ids_R1 = torch.multinomial(logprobs_RV.exp(), 1)
            sampled.append(ids_R1)
            chosen.append(logprobs_RV.gather(-1, ids_R1))
            counted.append(playing_R)
            playing_R = playing_R & (ids_R1[:, 0] != self._end_id)
            if len(sampled) == self._max_reply or not playing_R.any():
                break
            ids_RQ, mask_RQ = ids_R1, playing_R[:, None].to(torch.int64)
        counts = torch.stack(counted, 1).sum(1).tolist()
        ids = [row[:n] for row, n in zip(torch.cat(sampled, 1).tolist(), counts, strict=True)]
        values = [row[:n] for row, n in zip(torch.cat(chosen, 1).tolist(), counts, strict=True)]
        self._last = [row[-1:] for row in ids]
        return ids, values

    def _forward(self, ids_RQ: torch.Tensor, mask_RQ: torch.Tensor) -> torch.Tensor:
        """Return the logits after the last token; `mask_RQ` is 0 where a row has no token."""
        self._mask = torch.cat([self._mask, mask_RQ], 1)
        positions_RQ = self._lengths + (mask_RQ.cumsum(1) - 1).clamp(min=0)
        self._lengths = self._lengths + mask_RQ.sum(1, keepdim=True)
        output = self._model(
            input_ids=ids_RQ,
            attention_mask=self._mask,
            position_ids=positions_RQ,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
