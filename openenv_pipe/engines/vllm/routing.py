"""Choose the server of each episode: the one with the fewest episodes.

An episode stays on its server, which has cached the keys and values of earlier turns, and moves
only when that server is gone. The episodes of a group share a server, which then computes their
first prompt once, as long as no server gets more than its share of the episodes in flight. The load
is counted in episodes and not in requests, because every unfinished episode will send another one.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from openenv_pipe.engines.vllm.replica import Replica


@dataclass(frozen=True, kw_only=True, slots=True)
class _Assignment:
    replica: Replica
    group: int | None


class Router:
    """Keeps the server of each unfinished episode."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._assignments: dict[int, _Assignment] = {}  # by episode
        self._limit = 0

    def begin_rollouts(self, limit: int) -> None:
        """Set how many episodes play at once from now on."""
        self._limit = limit

    def replica_of(self, episode: int, group: int | None) -> Replica:
        """Return the server for the episode's next turn.

        If all servers are down, it is the episode's own, because they are being restarted.

        Raises EngineError: a server's restarts are used up.
        """
        self.reject_lost()
        # At least one server has the last policy, or is being started with it.
        replicas = [replica for replica in self._replicas if replica.may_play]
        replicas = replicas or [replica for replica in self._replicas if not replica.is_late]
        home = self._assignments.get(episode)
        if home is None or home.replica not in replicas:
            home = _Assignment(replica=self._choose(replicas, group), group=group)
            self._assignments[episode] = home
        return home.replica

    def reject_lost(self) -> None:
        """Raise EngineError if a server's restarts are used up."""
        for replica in self._replicas:
            if replica.failure is not None:
                raise replica.failure

    def forget(self, episode: int) -> None:
        self._assignments.pop(episode, None)

    def _choose(self, replicas: Sequence[Replica], group: int | None) -> Replica:
        if len(replicas) == 1:
            return replicas[0]
        numbers = Counter(home.replica.number for home in self._assignments.values())
        share = math.ceil(self._limit / len(replicas))
        for home in self._assignments.values():
            is_same_group = group is not None and home.group == group
            has_room = home.replica in replicas and numbers[home.replica.number] < share
            if is_same_group and has_room:
                return home.replica
        return min(replicas, key=lambda replica: numbers[replica.number])
