"""Which server an episode is played on: where the fewest are, and there to its end.

A server keeps keys and values of what it has read, so an episode's next turn costs only what is new
there, and its group's first prompt is read once where the group is together. So a group stays
together as far as no server gets more than its share of the episodes in flight. What counts is
episodes and not requests: one whose environment is at work comes back. Refused: moving an episode
for balance; it moves when its server is gone.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from openenv_pipe.engines.vllm.replica import Replica


@dataclass(frozen=True, kw_only=True, slots=True)
class _Home:
    """Where an episode is played."""

    replica: Replica
    group: int | None


class Router:
    """Knows where each unfinished episode is."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._homes: dict[int, _Home] = {}  # by episode
        self._limit = 0

    def expect(self, limit: int) -> None:
        """So many episodes play at once from now on."""
        self._limit = limit

    def replica_of(self, episode: int, group: int | None) -> Replica:
        """The server for the episode's next turn; its own if all are down: it may come back.

        Raises EngineError when one is down for good.
        """
        self.refuse_lost()
        # Of those that have the last policy, that is: there is always one, up or about to be.
        replicas = [replica for replica in self._replicas if replica.may_play]
        replicas = replicas or [replica for replica in self._replicas if not replica.is_late]
        home = self._homes.get(episode)
        if home is None or home.replica not in replicas:
            home = _Home(replica=self._choose(replicas, group), group=group)
            self._homes[episode] = home
        return home.replica

    def refuse_lost(self) -> None:
        """Raises EngineError when a server is down for good."""
        for replica in self._replicas:
            if replica.supervisor.failure is not None:
                raise replica.supervisor.failure

    def forget(self, episode: int) -> None:
        self._homes.pop(episode, None)

    def _choose(self, replicas: Sequence[Replica], group: int | None) -> Replica:
        if len(replicas) == 1:
            return replicas[0]
        numbers = Counter(home.replica.number for home in self._homes.values())
        share = math.ceil(self._limit / len(replicas))
        for home in self._homes.values():
            is_mate = group is not None and home.group == group
            if is_mate and home.replica in replicas and numbers[home.replica.number] < share:
                return home.replica
        return min(replicas, key=lambda replica: numbers[replica.number])
