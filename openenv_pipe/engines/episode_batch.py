"""Requests to the engine `local` that are sampled in one batch.

Shape letters: R requests of a call, A of them in the first rows, which are still computed;
V vocabulary.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from openenv_pipe.algorithms.prefix_tree import common_prefix
from openenv_pipe.engines.base import Completion, TokenRequest
from openenv_pipe.engines.sampling import sample, truncated, uniforms
from openenv_pipe.models.forward.row_forward import RowForward
from openenv_pipe.types import IMAGE_IDS, Finish

_MIN_DONE_SHARE = 1 / 8  # rows that are done leave the batch when they are this share of it


@dataclass(kw_only=True, slots=True)
class _Row:
    """A row of the cache; the batch's list has them in order."""

    episode: int | None  # None: no later request uses what is cached
    ids: list[int] = field(default_factory=list)  # the tokens whose keys and values are cached

    def num_cached(self, prompt_ids: Sequence[int]) -> int:
        """Return how many of the prompt's first tokens need not be computed: never all."""
        length = min(len(self.ids), len(prompt_ids) - 1)
        if prompt_ids[:length] != self.ids[:length]:
            length = common_prefix(prompt_ids[:length], self.ids[:length])
        # The forward pass knows the next position only after all images of the row.
        if max(self.ids[length:], default=0) >= IMAGE_IDS:
            return 0
        return length


class EpisodeBatch:
    """Episodes that are sampled together, and the cache of their prompts and completions.

    What is still decoded after its rollout batch was cancelled uses that batch's cache.
    """

    def __init__(
        self, forward: RowForward, *, device: torch.device, end_ids: Collection[int]
    ) -> None:
        self._forward = forward
        self._device = device
        self._end_ids = np.array(sorted(end_ids))
        self._rows: list[_Row] = []

    @torch.inference_mode()
    def generate(self, requests: Sequence[TokenRequest], version: int) -> list[Completion]:
        """Compute a completion for each request.

        Of several requests of an episode, the one that can use the most cached tokens continues the
        episode's row; the rows of the others end with the call. An episode without a request has
        ended, or waits for another model in a game: its row is given to others.
        """
        self._free_rows({request.episode for request in requests})
        order, num_cached = self._assign_rows(requests)
        in_rows = [requests[index] for index in order]
        decoding = _Decoding(self._forward, self._device, self._end_ids, num_cached, in_rows)
        decoding.run()
        completions: dict[int, Completion] = {}
        for place, (index, request) in enumerate(zip(order, in_rows, strict=True)):
            completion = completions[index] = decoding.completion(place, version)
            # The last token is sampled, but has no keys and values yet.
            self._rows[place].ids = [*request.prompt_ids, *completion.token_ids[:-1]]
        self._rows = [self._rows[place] for place in decoding.places_R]
        return [completions[index] for index in range(len(requests))]

    def _free_rows(self, kept: Collection[int | None]) -> None:
        """Drop the rows of other episodes, and move the last rows to where they were."""
        free = [number for number, row in enumerate(self._rows) if row.episode not in kept]
        staying = [number for number, row in enumerate(self._rows) if row.episode in kept]
        moves = [(row, to) for row, to in zip(reversed(staying), free, strict=False) if row > to]
        if moves:
            self._forward.copy_rows(*zip(*moves, strict=True))
            for row, to in moves:
                self._rows[to] = self._rows[row]
        del self._rows[len(staying) :]

    def _assign_rows(self, requests: Sequence[TokenRequest]) -> tuple[list[int], list[int]]:
        """Add rows for requests that have none.

        Returns for each row the index of its request, and how many tokens of the prompt are cached.
        """
        own: dict[int | None, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            own[request.episode].append(index)
        order, num_cached = [], []
        for row in self._rows:
            indices = own[row.episode]
            cached = [row.num_cached(requests[index].prompt_ids) for index in indices]
            num_cached.append(max(cached))
            order.append(indices[cached.index(num_cached[-1])])
        known, assigned = {row.episode for row in self._rows}, set(order)
        for index, request in enumerate(requests):
            if index not in assigned:
                episode = None if request.episode in known else request.episode
                self._rows.append(_Row(episode=episode))
                known.add(request.episode)
                order.append(index)
                num_cached.append(0)
        self._forward.reserve_rows(len(self._rows))
        return order, num_cached


class _Decoding:
    """The completions of one call: a forward pass over new tokens, then one for each decode step.

    Row r of the cache belongs to the request `places_R[r]`. Rows that are done change places with
    the last ones that are not, so that forward passes need only the first rows.
    """

    def __init__(
        self,
        forward: RowForward,
        device: torch.device,
        end_ids: np.ndarray,
        num_cached: Sequence[int],
        requests: Sequence[TokenRequest],
    ) -> None:
        """num_cached: how many tokens of each prompt are in its row."""
        self._forward = forward
        self._device = device
        self._end_ids = end_ids
        self._requests = requests
        num_rows, longest = len(requests), max(request.max_tokens for request in requests)
        self.places_R = np.arange(num_rows)
        # These are indexed by the place of the request, whichever row it has.
        self._limits = np.array([request.max_tokens for request in requests])
        self._temperatures = np.array([request.temperature for request in requests], np.float32)
        self._top_p = np.array([request.top_p for request in requests], np.float32)
        self._top_k = np.array([request.top_k for request in requests], np.int64)
        self._is_truncated = bool((self._top_p < 1.0).any() or self._top_k.any())
        self._seeds = np.array([request.seed for request in requests], np.uint64)
        self._num_sampled = np.array([request.num_sampled for request in requests], np.uint64)
        self._num_cached = np.array(num_cached)
        self._lengths = np.zeros(num_rows, dtype=np.int64)  # of completions; 0: not done
        self._token_ids = np.zeros((num_rows, longest), dtype=np.int64)
        self._logprobs = np.zeros((num_rows, longest), dtype=np.float32)

    def run(self) -> None:
        starts = self._num_cached.tolist()
        new_ids = [
            request.prompt_ids[start:]
            for request, start in zip(self._requests, starts, strict=True)
        ]
        images = {name: each for one in self._requests for name, each in one.images.items()}
        logits_AV = self._forward.feed(new_ids, starts, images)
        self._num_cached += [len(ids) for ids in new_ids]
        num_rows = len(new_ids)
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
            # A row that is done is fed a token as well, which its next one overwrites.
            logits_AV = self._forward.step(
                self._tensor(ids_A), self._tensor(self._num_cached[places_A])
            )
            self._num_cached[places_A[~is_done_A]] += 1

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
        temperatures_A = self._tensor(self._temperatures[places_A])
        if self._is_truncated:
            logits_AV = truncated(
                logits_AV,
                temperatures_A,
                self._tensor(self._top_p[places_A]),
                self._tensor(self._top_k[places_A]),
            )
        sampled_A, logprobs_A = sample(
            logits_AV, temperatures_A, self._tensor(uniforms(self._seeds[places_A], counters_A))
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
