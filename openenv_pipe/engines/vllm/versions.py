"""The versions of the policy that servers need, whichever way they travel.

A version is written once for all servers and sent to each. A server that has just started gets
every version that requests may name. `replica.py` keeps track of which server has which version.
"""

from collections.abc import Sequence

import numpy as np

from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.transfer import PolicyVersion, Transfer
from openenv_pipe.errors import EngineError


class Versions:
    """The versions of one run's policy, the current one last."""

    def __init__(self, transfer: Transfer, owner: Owner, prefix: str) -> None:
        """prefix: of the versions' names; it differs between runs that share a server."""
        self.transfer = transfer
        self.owner = owner  # the run
        self._prefix = prefix
        self._num_written = 0
        self._adopted: list[PolicyVersion] = []

    @property
    def latest(self) -> PolicyVersion | None:
        return self._adopted[-1] if self._adopted else None

    async def adopt(self, step: int, expected_PV: np.ndarray) -> PolicyVersion:
        """Prepare the policy as it is now for sending, and make it the latest version."""
        self._num_written += 1
        name = f"{self._prefix}-{self._num_written}-step-{step}"
        version = PolicyVersion(
            step=step,
            name=name,
            model=name if self.transfer.sends_adapters else BASE,
            label=self.owner.label(step),
            expected=expected_PV,
        )
        await self.transfer.write(version)
        self._adopted.append(version)
        return version

    async def restore(self, client: VllmClient) -> PolicyVersion | None:
        """Give a server that has just started the versions that it needs; return the latest.

        They include those that are adopted meanwhile. Raises EngineError and ServerGoneError.
        """
        sent = None
        while sent is not self.latest:
            await self.transfer.wait_until_readable()
            for version in self._adopted[-self.transfer.num_loaded :]:
                try:
                    await self.transfer.send(client, version, paused=False)
                except EngineError:
                    if version in self._adopted and self.transfer.can_read(version):
                        raise
                    continue  # It was retired meanwhile, or the learner has begun to change it.
                sent = version
        return sent

    async def retire(self, clients: Sequence[VllmClient]) -> None:
        """Drop old versions, first on the servers and then in files."""
        while len(self._adopted) > self.transfer.num_kept:
            await self.transfer.drop(clients, self._adopted.pop(0))

    async def withdraw(self, client: VllmClient) -> None:
        """Remove this run's versions from a server that keeps running after the run."""
        await self.transfer.withdraw(client, self._adopted)
