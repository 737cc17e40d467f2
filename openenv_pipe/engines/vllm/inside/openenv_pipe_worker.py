"""What we add to vLLM's workers: loading a whole policy into a server that goes on serving.

vLLM imports it by `--worker-extension-cls openenv_pipe_worker.PolicyWorker`, in its own
environment, so nothing of openenv_pipe is imported here. The class is mixed into vLLM's Worker.
"""

from pathlib import Path
from typing import Any

import torch
from openenv_pipe_broadcast import BroadcastError, Receiver
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform
from vllm.utils.nccl import unpinned_nccl_env


class PolicyWorker:
    """Its public methods are called over HTTP, by /collective_rpc, in every worker. They answer
    {"problem": ""} if all went well."""

    _receiver: Receiver | None = None

    def reload_policy(self, weights_path: str) -> dict[str, str]:
        """Loads all weights of a folder.

        A path without weights is refused before anything is touched: vLLM would go on with half of
        the old weights, and die at the next request.
        """
        if not any(Path(weights_path).glob("*.safetensors")):
            return {
                "problem": f"there are no *.safetensors in {weights_path}, as the server sees it"
            }
        self._load(weights_path=weights_path)
        return {"problem": ""}

    def join_broadcast(self, meeting: str) -> dict[str, str]:
        """From now on policies come from the learner that waits there, and from no other."""
        self.leave_broadcast()
        size = self.parallel_config.world_size
        try:
            with unpinned_nccl_env():  # what vLLM sets for its own groups, the learner does not
                self._receiver = Receiver(Path(meeting), self.rank, size, self.device)
        except BroadcastError as error:
            return {"problem": str(error)}
        return {"problem": ""}

    def leave_broadcast(self) -> dict[str, str]:
        """The opposite, whether it has joined or not."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        return {"problem": ""}

    def receive_policy(self) -> dict[str, str]:
        """Loads all weights, while the learner sends them."""
        assert self._receiver is not None, "join_broadcast first"
        coming = self._receiver.weights()
        try:
            self._load(weights_iterator=coming)
            for _ in coming:  # what the model has no use for
                pass
        except BaseException:
            self.leave_broadcast()  # or the learner would wait for its end
            raise
        return {"problem": ""}

    def _load(self, **source: Any) -> None:
        self.reload_weights(**source)
        if current_platform.is_cpu():
            self._repack_heads()

    @torch.inference_mode()
    def _repack_heads(self) -> None:
        """On a CPU a head computes with a packed copy of its weights. vLLM's reload renews the
        copies of the layers that it has read; a head tied to the embeddings is not one of them."""
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
