"""An engine."""

from openenv_pipe.engines.local import LocalEngine


class CountingEngine(LocalEngine):
    """The local engine, which also counts completions. It inherits what it can do:

    capabilities = EngineCapabilities(takes="token_ids", can_train=True, is_exact=True, ...)
    """

    def __init__(self, setup, *, max_batch):
        super().__init__(setup.policy, max_episodes=max_batch, executor=setup.executor)
        self._num_completions = 0

    async def generate(self, request):
        self._num_completions += 1
        return await super().generate(request)

    async def metrics(self):
        number, self._num_completions = self._num_completions, 0
        return {"engine/num_completions": number}
