"""An extension of vLLM's workers, which loads a whole policy into a running server.

vLLM imports it by `--worker-extension-cls openenv_pipe_worker.PolicyWorker` in its own Python
environment, so it imports nothing of openenv_pipe. vLLM adds the class to its Worker's bases.
"""

from pathlib import Path
from typing import Any

import torch
from openenv_pipe_amx import request_amx
from openenv_pipe_broadcast import FILES_INSTEAD, BroadcastError, Receiver
from openenv_pipe_claims import Claims
from openenv_pipe_ipc import gpu_id, rebuild_arguments
from openenv_pipe_reload import renewed

request_amx()  # every worker imports this module before it computes anything


class PolicyWorker:
    """Methods that /collective_rpc calls in every worker.

    They return {"problem": text}; the text is empty after success.
    """

    _receiver: Receiver | None = None
    _claims: Claims | None = None  # after the first claim

    def claim_server(
        self, owner: str, name: str, exclusive: bool, lease_s: float
    ) -> dict[str, Any]:
        """Claim the server for a run, or renew its claim; see `Claims.claim`."""
        self._claims = self._claims or Claims()
        return {"problem": "", **self._claims.claim(owner, name, exclusive, lease_s)}

    def release_server(self, owner: str) -> dict[str, Any]:
        """End the claim of a run."""
        if self._claims is not None:
            self._claims.release(owner)
        return {"problem": ""}

    def reload_policy(self, weights_path: str) -> dict[str, str]:
        """Load all weights of a folder.

        A folder without weights is rejected before vLLM reads it, because vLLM would drop half of
        the old weights and die at the next request.
        """
        if not any(Path(weights_path).glob("*.safetensors")):
            return {"problem": f"the server finds no *.safetensors in {weights_path}"}
        self._load(weights_path=weights_path)
        return {"problem": ""}

    def join_broadcast(self, meeting: str) -> dict[str, str]:
        """Connect to the learner that has made the file `meeting`, and leave any other learner."""
        self.leave_broadcast()
        size = self.parallel_config.world_size
        try:
            self._receiver = Receiver(Path(meeting), self.rank, size, self.device)
        except BroadcastError as error:
            return {"problem": str(error)}
        return {"problem": ""}

    def leave_broadcast(self) -> dict[str, str]:
        """Disconnect from the learner, if there is a connection."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        return {"problem": ""}

    def receive_policy(self) -> dict[str, str]:
        """Load all weights while the learner sends them."""
        assert self._receiver is not None, "join_broadcast first"
        coming = self._receiver.weights()
        try:
            self._load(weights_iterator=coming)
            for _ in coming:  # receive weights that the model does not read
                pass
        except BaseException:
            self.leave_broadcast()  # otherwise the learner would wait for this worker
            raise
        return {"problem": ""}

    def check_transfer(self, backend: str, learner: str) -> dict[str, str]:
        """Say why this worker cannot receive weights from the learner by vLLM's own transfer.

        backend: of vLLM's weight transfer, "nccl" or "ipc".
        learner: its version of NCCL, or the UUID of its GPU.
        """
        config = self.vllm_config.weight_transfer_config
        found = config.backend if config is not None else "none"
        if found != backend:
            return {
                "problem": f"the server was started with weight transfer {found}, expected "
                f"{backend}: `openenv-pipe engine command` prints its command"
            }
        if backend == "ipc":
            what, here = "GPU", gpu_id(self.device)
        else:
            what, here = "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
        if here != learner:
            return {
                "problem": f"weight transfer {backend} needs the learner's {what}, {learner}, but "
                f"the server uses {here}; {FILES_INSTEAD}"
            }
        return {"problem": ""}

    def receive_shared(self, chunk: dict[str, Any], buffer: dict[str, Any]) -> dict[str, str]:
        """Load some weights from a buffer of the learner, by vLLM's weight transfer "ipc".

        chunk: names, types, shapes and sizes of the weights in the buffer.
        buffer: the description of `openenv_pipe_ipc.describe`.
        """
        handles = {buffer["gpu"]: rebuild_arguments(buffer)}
        self.update_weights({**chunk, "ipc_handles": handles})
        return {"problem": ""}

    def _load(self, **source: Any) -> None:
        with renewed(self.model_runner.get_model()):
            self.reload_weights(**source)
