"""Keep what an update computes of each trained token, for readers of the run folder.

Shape letter: N trained tokens of a batch.
"""

from collections.abc import Sequence

import numpy as np
import torch

from openenv_pipe.algorithms.batch import Batch
from openenv_pipe.learner.objective import Tokens
from openenv_pipe.learner.ranks import Ranks
from openenv_pipe.types import Sample, TrainedTokens


class TokenRecorder:
    """Collects the entropy and the mismatch of the trained tokens of one step.

    They stay on the device until they are read, so that no batch waits for them.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._places = {id(sample): place for place, sample in enumerate(samples)}
        self._batches: list[tuple[Batch, torch.Tensor]] = []

    def add(self, batch: Batch, tokens: Tokens) -> None:
        """Keep a batch's tokens; the mismatch is unknown without the logprobs of the start."""
        entropy_N, start_N = tokens.entropy.detach(), tokens.start_logprobs
        unknown_N = torch.full_like(entropy_N, torch.nan)
        mismatch_N = unknown_N if start_N is None else start_N.detach() - tokens.sampled_logprobs
        self._batches.append((batch, torch.stack([entropy_N, mismatch_N]).half()))

    def collected(self, ranks: Ranks) -> list[TrainedTokens | None]:
        """Return the tokens of each sample, of all ranks; None for a sample without any."""
        found: dict[int, np.ndarray] = {}
        for batch, values in self._batches:
            counts = np.bincount(batch.sample_index.cpu().numpy(), minlength=len(batch.samples))
            parts = np.split(values.cpu().numpy(), np.cumsum(counts)[:-1], axis=1)
            places = (self._places[id(sample)] for sample in batch.samples)
            found.update(zip(places, parts, strict=True))
        for others in ranks.gather(found):
            found |= others
        return [_tokens(found.get(place)) for place in range(len(self._places))]


def _tokens(values: np.ndarray | None) -> TrainedTokens | None:
    return None if values is None else TrainedTokens(entropy=values[0], mismatch=values[1])
