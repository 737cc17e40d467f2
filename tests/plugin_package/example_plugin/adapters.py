"""An adapter between the environment's numbers and chat messages."""

from openenv_pipe.types import Opening


class NumberAdapter:
    """Shows the number as it is, and takes any reply for an answer."""

    def __init__(self, *, system):
        self._system = {"role": "system", "content": system}

    async def open(self, observation, ask):
        return Opening(messages=[self._system, *self.follow(observation)])

    def read(self, reply):
        return [{"answer": reply}]

    def follow(self, observation):
        return [{"role": "user", "content": str(observation["number"])}]

    def reject(self, why):
        return [{"role": "user", "content": why}]
