"""The two learners that `learner.py` compares, each in its own process.

Both do the same step (loss, backward, clip, AdamW) with the same model on the same samples: this
project's learner and TRL's trainer. The process reads commands as lines of JSON and answers each
with one line. TRL's step calls `GRPOTrainer._compute_loss` itself with its own fused head, on a
stand-in object that has the attributes it reads.
"""

import gc
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from openenv_pipe.types import Sample

LR = 1e-5
MAX_GRAD_NORM = 1.0
CLIP = 0.2


def build_model(shape: dict[str, int]) -> Qwen3ForCausalLM:
    """Build a model whose random weights are the same in both processes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_size"],
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def build_samples(case: dict[str, Any]) -> list[Sample]:
    """Build G samples of one prompt; their sampled logprobs are near those of a random model."""
    draw = random.Random(0)
    vocabulary, (given, chosen) = case["shape"]["vocabulary"], case["lengths"]
    near = -torch.tensor(float(vocabulary)).log().item()
    prompt = [draw.randrange(vocabulary) for _ in range(given)]
    samples = []
    for member in range(case["group_size"]):
        advantage = draw.uniform(-2.0, 2.0)
        samples.append(
            Sample(
                group="0",
                member=member,
                num_episode_tokens=chosen,
                token_ids=prompt + [draw.randrange(vocabulary) for _ in range(chosen)],
                loss_mask=[False] * given + [True] * chosen,
                logprobs=[0.0] * given + [near + draw.uniform(-0.1, 0.1) for _ in range(chosen)],
                advantages=[0.0] * given + [advantage] * chosen,
            )
        )
    return samples


class Ours:
    """`Learner.update`, with its packing, its metrics and its optimizer."""

    def __init__(self, case: dict[str, Any]) -> None:
        from openenv_pipe.config.compose import compose
        from openenv_pipe.learner.learner import Learner
        from openenv_pipe.models.chat.chat_template import ChatFormat
        from openenv_pipe.models.forward.attention.packed import use_packed_attention
        from openenv_pipe.models.policy import Policy
        from openenv_pipe.models.tiny import build_tokenizer
        from openenv_pipe.system.process_settings import keep_freed_memory

        changes = {"tokens_per_batch": 1 << 20, "temperature": 1.0, "updates_per_step": 1}
        changes |= {"loss.type": "grpo", "loss.clip_low": CLIP, "loss.clip_high": CLIP}
        changes |= {"optimizer.type": "adamw", "optimizer.lr": LR}
        changes |= {"optimizer.max_grad_norm": MAX_GRAD_NORM}
        overrides = [f"trainer.{key}={value}" for key, value in changes.items()]
        trainer = compose(["conf=echo", *overrides]).config.trainer
        keep_freed_memory()
        self.case, self.model = case, build_model(case["shape"])
        use_packed_attention(self.model)
        chat = ChatFormat(build_tokenizer())
        policy = Policy(self.model, chat, device=torch.device("cpu"), autocast=torch.float32)
        given, chosen = case["lengths"]
        self._learner = Learner(policy, trainer, max_episode_tokens=given + chosen, seed=0)
        self._samples = build_samples(case)

    def step(self) -> float:
        return self._learner.update(self._samples, 1)["loss/policy"]

    def loss_and_gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss and the gradients of a step without updating the weights."""
        found: dict[str, torch.Tensor] = {}

        def keep() -> float:
            found.update({n: p.grad for n, p in self.model.named_parameters()})
            self.model.zero_grad(set_to_none=True)
            return 0.0

        optimizer = self._learner.optimizer
        step, optimizer.step = optimizer.step, keep
        try:
            return self.step(), found
        finally:
            optimizer.step = step


class Trl:
    """TRL's loss on TRL's tensors, then the same steps as in transformers' Trainer."""

    def __init__(self, case: dict[str, Any]) -> None:
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.utils import add_fused_lm_head

        self.case, self.model = case, build_model(case["shape"])
        add_fused_lm_head(self.model, temperature=1.0, outputs=("log_probs", "entropy"))
        self.model.train()
        self._compute_loss = GRPOTrainer._compute_loss
        self._trainer = stand_in(GRPOTrainer, self.model, case["lengths"][1])
        self._inputs = trl_inputs(build_samples(case), case["lengths"][0])
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, weight_decay=0.0, fused=True
        )

    def step(self) -> float:
        loss = self._compute_loss(self._trainer, self.model, self._inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def loss_and_gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        loss = self._compute_loss(self._trainer, self.model, self._inputs)
        loss.backward()
        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.model.zero_grad(set_to_none=True)
        return loss.item(), found


class Rate:
    """The arithmetic that a step needs, and the rate that the machine reaches.

    It runs in its own process, so that it does not count as memory of either learner."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.model = case, build_model(case["shape"])


def stand_in(kind: type, model: torch.nn.Module, max_tokens: int) -> Any:
    """Build the stand-in trainer: one process, no gradient accumulation, no reference model."""
    trainer = SimpleNamespace(
        model=model,
        loss_type="grpo",
        beta=0.0,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        max_completion_length=max_tokens,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1, report_to=[]
        ),
        accelerator=SimpleNamespace(
            num_processes=1,
            is_main_process=True,
            autocast=nullcontext,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
        ),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    trainer._get_per_token_logps_and_entropies = kind._get_per_token_logps_and_entropies.__get__(
        trainer
    )
    return trainer


def trl_inputs(samples: list[Sample], given: int) -> dict[str, torch.Tensor]:
    prompts = torch.tensor([sample.token_ids[:given] for sample in samples])
    completions = torch.tensor([sample.token_ids[given:] for sample in samples])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.tensor([sample.advantages[-1] for sample in samples]),
        "old_per_token_logps": torch.tensor([sample.logprobs[given:] for sample in samples]),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }


# --- measuring ----------------------------------------------------------------------------------


def memory_mb(name: str) -> float:
    """Return this process's memory: VmRSS is the current value, VmHWM the peak since the reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    return int(line.split()[1]) / 1024


def needed_products(model: torch.nn.Module, case: dict[str, Any]) -> float:
    """Count the multiplications and additions of a step's matrix products.

    These are three products for every linear layer, and attention over the tokens that each token
    sees; shared prefixes count once.
    """
    (given, chosen), members, shape = case["lengths"], case["group_size"], case["shape"]
    tokens = given + members * (chosen - 1)  # The last position predicts nothing.
    layers = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    head = model.get_output_embeddings()
    linear = sum(tokens * layer.weight.numel() for layer in layers if layer is not head)
    linear += members * chosen * head.weight.numel()
    seen = given * (given + 1) / 2 + members * sum(given + n + 1 for n in range(chosen - 1))
    attention = 2 * seen * shape["heads"] * shape["head_size"] * shape["layers"]
    return 2 * 3 * (linear + attention)


def measured_rate() -> float:
    """Return multiplications and additions per second of a large float32 matrix product."""
    one, other = torch.randn(1536, 2048), torch.randn(2048, 2048)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        one @ other
        times.append(time.perf_counter() - started)
    return 2 * 1536 * 2048 * 2048 / statistics.median(times)


def serve(side: Ours | Trl | Rate) -> None:
    gc.collect()
    start_mb, peak_mb = memory_mb("VmRSS"), 0.0
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "steps":
            Path("/proc/self/clear_refs").write_text(
                "5"
            )  # This resets VmHWM, so that only the steps count.
            started, worked = time.perf_counter(), time.process_time()
            for _ in range(command["count"]):
                answer["loss"] = side.step()
            answer["step_s"] = (time.perf_counter() - started) / command["count"]
            answer["cpu_s"] = (time.process_time() - worked) / command["count"]
            peak_mb = max(peak_mb, memory_mb("VmHWM"))
        elif command["do"] == "memory":
            answer = {"start_mb": start_mb, "peak_mb": peak_mb}
        elif command["do"] == "rate":
            answer = {"rate": measured_rate(), "needed": needed_products(side.model, side.case)}
        elif command["do"] == "gradients":
            answer["loss"], gradients = side.loss_and_gradients()
            save_file(
                {n: g.contiguous() for n, g in gradients.items() if g is not None},
                command["path"],
            )
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    given_case = json.loads(sys.argv[2])
    serve({"ours": Ours, "trl": Trl, "rate": Rate}[sys.argv[1]](given_case))
