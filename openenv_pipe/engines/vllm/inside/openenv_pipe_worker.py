"""What we add to vLLM's workers: loading a whole policy into a server that goes on serving.

vLLM imports it by `--worker-extension-cls openenv_pipe_worker.PolicyWorker`, in its own
environment, so nothing of openenv_pipe is imported here. The class is mixed into vLLM's Worker.
"""

from pathlib import Path

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform


class PolicyWorker:
    """`reload_policy` is called over HTTP, by /collective_rpc, in every worker."""

    def reload_policy(self, weights_path: str) -> dict[str, str]:
        """Loads all weights of a folder; {"problem": ""} if it could.

        A path without weights is refused before anything is touched: vLLM would go on with half of
        the old weights, and die at the next request.
        """
        if not any(Path(weights_path).glob("*.safetensors")):
            return {
                "problem": f"there are no *.safetensors in {weights_path}, as the server sees it"
            }
        self.reload_weights(weights_path=weights_path)
        if current_platform.is_cpu():
            self._repack_heads()
        return {"problem": ""}

    @torch.inference_mode()
    def _repack_heads(self) -> None:
        """On a CPU a head computes with a packed copy of its weights. vLLM's reload renews the
        copies of the layers that it has read; a head tied to the embeddings is not one of them."""
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
