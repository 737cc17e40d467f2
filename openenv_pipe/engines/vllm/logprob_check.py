"""Compare logprobs of a server with the trainer's, on two fixed prompts, or three with images.

The comparison finds an adapter that is old or not applied, cached keys and values of old weights,
logprobs without the temperature, and another model. The temperature is not 1, so that raw logprobs
differ. The prompts are longer than a block of the server's cache and always the same, so that keys
and values cached with older weights would be used and found.

Shape letters: P prompts, V vocabulary, K ids that are compared.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.image_features import ImageEncoder
from openenv_pipe.errors import TrainingError
from openenv_pipe.registry import if_command

if TYPE_CHECKING:
    from openenv_pipe.models.weights import PolicyWeights

BOUNDS = {"float32": 1e-4, "bfloat16": 0.3}  # of the difference of two logprobs
TEMPERATURE = 0.7
LONGEST_PROMPT = 160  # tokens; a block of the cache is 128 on a CPU, 16 on a GPU
NUM_COMPARED = 16  # the likeliest ids; the server reports at most 20
NUM_TEXT = 3  # tokens before each image of a prompt, and after the last
PROBE_MOVES = 10  # the probe's adapter changes a logprob by this many times the bound


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterProbe:
    """An adapter with made-up values, and the logprobs with it.

    It shows whether a server applies adapters at all, because an untrained one changes nothing.
    """

    name: str
    folder: Path
    expected: np.ndarray  # [P, V]


class LogprobCheck:
    """Keeps the logprobs of the trainer's last policy, and compares servers with them."""

    def __init__(self, weights: "PolicyWeights", *, dtype: str, max_model_len: int) -> None:
        self.bound = BOUNDS[dtype]
        # The largest change of a logprob by the last policy. If it is below the bound, the check
        # cannot tell that policy from the one before.
        self.moved: float | None = None
        self._weights = weights
        self._expected_PV: np.ndarray | None = None
        self.prompts = fixed_prompts(weights.vocabulary_size, max_model_len)
        if weights.probe_images:
            self.prompts.append(_image_prompt(weights, self.prompts[0]))
        self._encoder = ImageEncoder(weights)

    def begin(self, root: Path, *, with_probe: bool) -> AdapterProbe | None:
        """Expect the policy as it is now, and write a probe's adapter into a folder in `root`.

        Call it in torch's thread. with_probe: whether servers get adapters at all
        """
        self.expect(self.compute())
        if not with_probe:
            return None
        folder, moves = root / "probe", PROBE_MOVES * self.bound
        expected_PV = self._weights.write_probe(folder, self.prompts, TEMPERATURE, moves=moves)
        return AdapterProbe(name=f"{root.name}-probe", folder=folder, expected=expected_PV)

    def compute(self) -> np.ndarray:
        """Compute logprobs [P, V] of the policy as it is now. Call it in torch's thread."""
        return self._weights.next_logprobs(self.prompts, TEMPERATURE)

    def expect(self, expected_PV: np.ndarray) -> None:
        """Set the logprobs [P, V] of the trainer's policy."""
        if self._expected_PV is not None:
            self.moved = float(np.abs(expected_PV - self._expected_PV).max())
        self._expected_PV = expected_PV

    async def check(
        self, client: VllmClient, model: str, expected_PV: np.ndarray, what: str
    ) -> float:
        """Return the largest difference between a logprob of the server and of the trainer.

        what: the beginning of the error message, which says when the check was made.

        Raises TrainingError: the difference is above the bound.
        """
        answers = await asyncio.gather(
            *(
                self._compared(client, model, ids, expected_V)
                for ids, expected_V in zip(self.prompts, expected_PV, strict=True)
            )
        )
        difference, server, trainer = max(answers, key=lambda each: (math.isnan(each[0]), each[0]))
        if not difference <= self.bound:  # also for NaN
            raise TrainingError(
                f"{what}: the server at {client.url} has another policy than the trainer. The "
                f"logprob of a token after a fixed prompt is {server:.6f} there and {trainer:.6f} "
                f"here, a difference of {difference:.2g} where {self.bound:g} is allowed; "
                "it may serve old weights, another model, or raw logprobs"
            )
        return difference

    async def try_probe(self, client: VllmClient, probe: AdapterProbe, number: int) -> None:
        """Check that the server with this number applies the probe's adapter as the trainer does.

        Raises TrainingError: the logprobs under that adapter differ.
        """
        name = f"{probe.name}-{number}"
        await client.load_adapter(name, probe.folder)
        try:
            await self._check_probe(client, name, probe.expected)
        finally:
            await client.unload_adapter(name)

    async def _check_probe(self, client: VllmClient, model: str, probe_PV: np.ndarray) -> None:
        assert self._expected_PV is not None
        moved = float(np.abs(probe_PV - self._expected_PV).max())
        allowed = max(self.bound, moved / 4)
        for ids, probe_V in zip(self.prompts, probe_PV, strict=True):
            difference, server, trainer = await self._compared(client, model, ids, probe_V)
            if not difference <= allowed:
                printed = if_command("engine", ", as `openenv-pipe engine command` prints it")
                raise TrainingError(
                    f"the server at {client.url} has another base model than the trainer, or does "
                    "not apply adapters as the trainer does: with an adapter of made-up values a "
                    f"logprob is {server:.6f} there and {trainer:.6f} here; start the server with "
                    f"the model of model.path{printed}, or set "
                    "engine.publish=merged, which sends no adapters"
                )

    async def _compared(
        self, client: VllmClient, model: str, ids: Sequence[int], expected_V: np.ndarray
    ) -> tuple[float, float, float]:
        """Return the largest difference among the likeliest ids, and the two logprobs there."""
        likeliest_K = np.argsort(-expected_V, kind="stable")[:NUM_COMPARED]
        wanted = [int(id) for id in likeliest_K]
        prompt, features = self._encoder.encode(ids, self._weights.probe_images)
        found = await client.next_logprobs(model, prompt, wanted, TEMPERATURE, features)
        server_K = np.array(found)
        trainer_K = expected_V[likeliest_K]
        differences_K = np.abs(server_K - trainer_K)
        worst = int(np.argmax(np.where(np.isnan(differences_K), np.inf, differences_K)))
        return float(differences_K[worst]), float(server_K[worst]), float(trainer_K[worst])


def _image_prompt(weights: "PolicyWeights", text: Sequence[int]) -> list[int]:
    """Return a prompt that shows made-up images between token ids of a text."""
    ids = list(text[:NUM_TEXT])
    for image in weights.probe_images.values():
        ids += [image.token_id] * weights.num_image_tokens(image)
        ids += text[:NUM_TEXT]
    return ids


def fixed_prompts(vocabulary_size: int, max_model_len: int) -> list[list[int]]:
    """Return two prompts of made-up token ids that differ in their last token only."""
    length = min(LONGEST_PROMPT, max_model_len - 1)
    ids = [(7919 * place + 17) % vocabulary_size for place in range(length + 1)]
    return [ids[:length], [*ids[: length - 1], ids[length]]]
