"""Weight publishers: give the policy's new weights to the engine when it can accept them."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from openenv_pipe.engines.base import Engine

_log = logging.getLogger(__name__)


class WeightPublisher(Protocol):
    """Publishes the policy's weights for sampling."""

    version: int  # of the current weights: the step of GRPO that they come from

    async def begin_update(self) -> None:
        """Announce that the learner changes the weights until `publish` is called."""

    async def publish(self, version: int) -> None:
        """Sample later groups with the policy's current weights."""

    async def metrics(self) -> Mapping[str, float]:
        """Return what sampling and publishing have measured since the last call."""


class EnginePublisher:
    """Publishes to an engine; after the current episodes if it cannot publish during them."""

    def __init__(self, engine: Engine) -> None:
        self.version = 0
        self._engine = engine
        self._is_published = True
        self._sampling: set[asyncio.Task[Any]] = set()

    def track(self, sampling: asyncio.Task[Any]) -> None:
        """Take note that a task samples with the engine until it is done."""
        self._sampling.add(sampling)
        sampling.add_done_callback(self._sampling.discard)

    async def begin_update(self) -> None:
        await self._engine.begin_update(idle=not self._under_way())

    async def publish(self, version: int) -> None:
        self.version = version
        self._is_published = False
        if self._engine.capabilities.publishes_in_flight or not self._under_way():
            await self.publish_late()

    async def publish_late(self) -> None:
        """Publish the weights that `publish` has deferred, if there are any."""
        if not self._is_published:
            await self._engine.publish(self.version)
            _log.debug("published the weights of step %d", self.version)
            self._is_published = True

    async def clear_engine(self) -> None:
        """Prepare the engine for an evaluation: wait for its episodes, publish late weights."""
        under_way = self._under_way()
        if under_way and not self._engine.capabilities.publishes_in_flight:
            await asyncio.wait(under_way)
        await self.publish_late()

    async def metrics(self) -> Mapping[str, float]:
        return await self._engine.metrics()

    def _under_way(self) -> set[asyncio.Task[Any]]:
        return {task for task in self._sampling if not task.done()}
