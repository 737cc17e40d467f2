"""Conversations of the engine `local` that are sampled in one batch.

Shape letters: R conversations of a wave, of which the first A are not done; T tokens of a
completion, V vocabulary.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from openenv_pipe.engines.base import Completion, TokenRequest
from openenv_pipe.engines.sampling import sample, uniforms
from openenv_pipe.models.row_forward import RowForward
from openenv_pipe.types import Finish, Pictures

Key = tuple[int, int]  # of a conversation: its episode and its branch
_MIN_DONE_SHARE = 1 / 8  # rows that are done leave the batch when they are so much of it


@dataclass(kw_only=True, slots=True)
class _Conversation:
    """One conversation's tokens; its row of the cache is its place in the lane's list."""

    key: Key
    length: int = 0  # number of tokens whose keys and values are cached
    pending: list[int] = field(default_factory=list)  # the tokens after those
    num_sampled: int = 0

    def keep(self, num_tokens: int) -> None:
        """Forget all tokens but the first ones. Their keys and values will be overwritten."""
        self.pending = self.pending[: max(0, num_tokens - self.length)]
        self.length = min(self.length, num_tokens)


class Lane:
    """The conversations of a part of a collection's episodes, and their cache.

    A wave that still runs after its collection was cancelled uses the lane of that collection.
    """

    def __init__(
        self, forward: RowForward, *, device: torch.device, end_ids: Collection[int]
    ) -> None:
        self._forward = forward
        self._device = device
        self._end_ids = np.array(sorted(end_ids))
        self._rows: list[_Conversation] = []
        self._ended: set[Key] = set()

    def end_episode(self, episode: int) -> None:
        """Give the episode's row to others, from the next wave on."""
        self._ended.add((episode, 0))

    @torch.inference_mode()
    def run_wave(self, requests: Sequence[TokenRequest], version: int) -> list[Completion]:
        """Compute a completion for each request.

        Each episode of the lane that has not ended has a request of branch 0. The conversations of
        other branches end with the wave.
        """
        by_key = {(request.episode, request.branch): request for request in requests}
        self._seat(by_key)
        keys = [conversation.key for conversation in self._rows]
        in_rows = [by_key[key] for key in keys]
        for conversation, request in zip(self._rows, in_rows, strict=True):
            if request.num_kept is not None:
                conversation.keep(request.num_kept)
            conversation.pending += request.new_ids
        wave = _Wave(self._forward, self._device, self._end_ids, self._rows, in_rows)
        wave.run({name: each for request in requests for name, each in request.pictures.items()})
        self._rows = [self._rows[place] for place in wave.places_R]
        self._ended.update(key for key in by_key if key[1])
        places = {key: place for place, key in enumerate(keys)}
        return [wave.completion(places[key], version) for key in by_key]

    def _seat(self, keys: Iterable[Key]) -> None:
        """Give a row to each new conversation, and move the last rows to those of ended ones."""
        free = [row for row, each in enumerate(self._rows) if each.key in self._ended]
        staying = [row for row, each in enumerate(self._rows) if each.key not in self._ended]
        moves = [(row, to) for row, to in zip(reversed(staying), free, strict=False) if row > to]
        if moves:
            self._forward.copy_rows(*zip(*moves, strict=True))
            for row, to in moves:
                self._rows[to] = self._rows[row]
        del self._rows[len(staying) :]
        self._ended.clear()
        known = {conversation.key for conversation in self._rows}
        self._rows += [_Conversation(key=key) for key in keys if key not in known]
        self._forward.reserve_rows(len(self._rows))


class _Wave:
    """One batch of completions: a forward pass over new tokens, then one for each token.

    Row r of the cache belongs to the conversation and the request `places_R[r]`. Rows that are done
    change places with the last ones that are not, so that forward passes need only the first rows.
    """

    def __init__(
        self,
        forward: RowForward,
        device: torch.device,
        end_ids: np.ndarray,
        conversations: Sequence[_Conversation],
        requests: Sequence[TokenRequest],
    ) -> None:
        self._forward = forward
        self._device = device
        self._end_ids = end_ids
        self._conversations = conversations
        num_rows, longest = len(requests), max(request.max_tokens for request in requests)
        self.places_R = np.arange(num_rows)
        # These are indexed by the place of the request, whichever row it has.
        self._limits = np.array([request.max_tokens for request in requests])
        self._temperatures = np.array([request.temperature for request in requests], np.float32)
        top_p = np.array([request.top_p for request in requests], np.float32)
        self._top_p = top_p if (top_p < 1.0).any() else None
        self._seeds = np.array([request.seed for request in requests], np.uint64)
        self._num_sampled = np.array([each.num_sampled for each in conversations], np.uint64)
        self._num_cached = np.array([each.length for each in conversations])
        self._lengths = np.zeros(num_rows, dtype=np.int64)  # of completions; 0: not done
        self._token_ids = np.zeros((num_rows, longest), dtype=np.int64)
        self._logprobs = np.zeros((num_rows, longest), dtype=np.float32)

    def run(self, pictures: Pictures) -> None:
        """Sample all completions, and note in the conversations what is cached and pending.

        pictures: those in the pending tokens.
        """
        pending = [conversation.pending for conversation in self._conversations]
        logits_AV = self._forward.feed(pending, self._num_cached.tolist(), pictures)
        self._num_cached += [len(ids) for ids in pending]
        num_rows = len(pending)
        for number in range(self._token_ids.shape[1]):
            places_A = self.places_R[:num_rows]
            ids_A = self._sample(logits_AV, places_A, number)
            is_done_A = self._lengths[places_A] > 0
            if is_done_A.all():
                break
            if is_done_A.sum() >= _MIN_DONE_SHARE * num_rows:
                order_A = self._move_done_rows(is_done_A)
                num_rows -= is_done_A.sum()
                ids_A, is_done_A = ids_A[order_A][:num_rows], is_done_A[order_A][:num_rows]
                places_A = self.places_R[:num_rows]
            # A row that is done gets a token as well, which its next one overwrites.
            logits_AV = self._forward.step(
                self._tensor(ids_A), self._tensor(self._num_cached[places_A])
            )
            self._num_cached[places_A[~is_done_A]] += 1
        for place, conversation in enumerate(self._conversations):
            length = self._lengths[place]
            conversation.length = int(self._num_cached[place])
            conversation.pending = [int(self._token_ids[place, length - 1])]
            conversation.num_sampled += int(length)

    def completion(self, place: int, version: int) -> Completion:
        length = self._lengths[place]
        token_ids = self._token_ids[place, :length].tolist()
        return Completion(
            token_ids=token_ids,
            logprobs=self._logprobs[place, :length].tolist(),
            finish=Finish.STOP if token_ids[-1] in self._end_ids else Finish.LENGTH,
            policy_versions=[version],
        )

    def _sample(self, logits_AV: torch.Tensor, places_A: np.ndarray, number: int) -> np.ndarray:
        """Sample token `number` of the completions and return the ids [A]."""
        counters_A = self._num_sampled[places_A] + np.uint64(number)
        sampled_A, logprobs_A = sample(
            logits_AV,
            self._tensor(self._temperatures[places_A]),
            self._tensor(uniforms(self._seeds[places_A], counters_A)),
            None if self._top_p is None else self._tensor(self._top_p[places_A]),
        )
        ids_A = sampled_A.cpu().numpy()
        self._token_ids[places_A, number] = ids_A
        self._logprobs[places_A, number] = logprobs_A.cpu().numpy()
        ends_A = (ids_A[:, None] == self._end_ids).any(1) | (number + 1 >= self._limits[places_A])
        self._lengths[places_A[ends_A & (self._lengths[places_A] == 0)]] = number + 1
        return ids_A

    def _move_done_rows(self, is_done_A: np.ndarray) -> np.ndarray:
        """Exchange rows until those that are not done come first; return the old row of each."""
        num_left = len(is_done_A) - is_done_A.sum()
        order_A = np.arange(len(is_done_A))
        done = np.flatnonzero(is_done_A[:num_left])
        others = num_left + np.flatnonzero(~is_done_A[num_left:])
        order_A[done], order_A[others] = others, done
        if len(done):
            self._forward.copy_rows(
                [*done.tolist(), *others.tolist()], [*others.tolist(), *done.tolist()]
            )
        self.places_R[: len(order_A)] = self.places_R[order_A]
        return order_A

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
