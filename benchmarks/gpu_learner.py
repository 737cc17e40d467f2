"""Measure a GRPO step of the learner on a GPU: tokens per second, share of bfloat16 rate, memory.

The shapes of Qwen3 0.6B, 1.7B and 4B with random weights, in full (float32 weights, bfloat16
products) or with LoRA of rank 16 on every linear layer, sequences of 2k to 64k tokens, alone and as
groups that share their prompt. It needs only this repository and its dependencies, no model hub and
no environment. It first checks that attention over packed rows gives the same logprobs on this
device as transformers' own attention. With `--side trl` the steps are those of TRL's trainer on the
same model and samples (`gpu_learner_trl.py`).

    python benchmarks/gpu_learner.py --shape 1.7b --train full
    python benchmarks/gpu_learner.py --tiny     # the same with a small model, on a CPU too

`gpu_acceptance.py` runs it for all of them.
"""

import argparse
import datetime
import json
import random
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from learner_sides import CLIP, LR, MAX_GRAD_NORM
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.config.compose import compose
from openenv_pipe.learner.learner import Learner
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.forward.attention.packed import use_packed_attention
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.types import Sample

if TYPE_CHECKING:
    from gpu_learner_trl import TrlLearner

QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
SMALLER = QWEN3 | {"num_hidden_layers": 28, "num_attention_heads": 16}
SHAPES = {
    "0.6b": SMALLER | {"hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": SMALLER | {"hidden_size": 2048, "intermediate_size": 6144},
    "4b": QWEN3
    | {"num_hidden_layers": 36, "num_attention_heads": 32}
    | {"hidden_size": 2560, "intermediate_size": 9728},
}
MAX_LENGTH = 65_536
TINY = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
RANK = 16
# prompt, reply, members: alone up to 64k tokens, and groups that share their prompt
CASES = [(1024, 1024, 1), (1024, 1024, 8), (4096, 12_288, 1), (12_288, 512, 8), (32_768, 32_768, 1)]
TINY_CASES = [(16, 16, 4), (24, 40, 1)]
AGREEMENT = {
    torch.float32: 1e-4,
    torch.bfloat16: 0.15,
}  # largest difference of logprobs that is allowed


def build_model(shape: dict[str, int], device: str, *, in_full: bool) -> Any:
    """Build a model whose random weights are the same for both sides."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, max_position_embeddings=MAX_LENGTH, tie_word_embeddings=True, rms_norm_eps=1e-6
    )
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(config).to(torch.float32 if in_full else precision(device))
    if in_full:
        return model
    lora = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def precision(device: str) -> torch.dtype:
    """Return the type of the products."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def build_policy(model: Any, device: str, *, checkpointing: bool) -> Policy:
    use_packed_attention(model.get_base_model() if isinstance(model, PeftModel) else model)
    return Policy(
        model,
        ChatFormat(build_tokenizer()),
        device=torch.device(device),
        autocast=precision(device),
        activation_checkpointing=checkpointing,
    )


def build_learner(policy: Policy) -> Learner:
    changes = {"tokens_per_batch": 1 << 20, "temperature": 1.0, "updates_per_step": 1}
    changes |= {"loss.type": "grpo", "loss.clip_low": CLIP, "loss.clip_high": CLIP}
    changes |= {"optimizer.type": "adamw", "optimizer.lr": LR}
    changes |= {"optimizer.max_grad_norm": MAX_GRAD_NORM}
    overrides = [f"trainer.{key}={value}" for key, value in changes.items()]
    trainer = compose(["conf=echo", *overrides]).config.trainer
    return Learner(policy, trainer, max_episode_tokens=MAX_LENGTH, seed=0)


def build_samples(vocabulary: int, given: int, chosen: int, members: int) -> list[Sample]:
    draw = random.Random(0)
    near = -torch.tensor(float(vocabulary)).log().item()
    prompt = [draw.randrange(vocabulary) for _ in range(given)]
    return [
        Sample(
            group="0",
            member=member,
            num_episode_tokens=chosen,
            token_ids=prompt + [draw.randrange(vocabulary) for _ in range(chosen)],
            loss_mask=[False] * given + [True] * chosen,
            logprobs=[0.0] * given + [near] * chosen,
            advantages=[0.0] * given + [draw.uniform(-2.0, 2.0)] * chosen,
        )
        for member in range(members)
    ]


def check_agreement(policy: Policy, vocabulary: int) -> float:
    """Return the largest difference between logprobs of a packed, shared row and of each sample
    alone by transformers' own attention. Raises AssertionError if it is above the bound."""
    samples = build_samples(vocabulary, 40, 24, 3)
    with torch.no_grad():
        packed_N = policy.logprobs(pack(samples, share=True, device=policy.device), 1.0)[0]
        own = []
        for sample in samples:
            ids = torch.tensor([sample.token_ids], device=policy.device)
            logprobs = torch.log_softmax(policy.model_logits(ids)[0, :-1].float(), dim=-1)
            own.append(logprobs.gather(1, ids[0, 1:, None])[sample.loss_mask.index(True) - 1 :, 0])
    difference = (packed_N - torch.cat(own)).abs().max().item()
    assert difference <= AGREEMENT[policy.precision], difference
    return difference


def measured_rate(device: str) -> float:
    """Return multiplications and additions per second of a large product in training precision."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(12):
        synchronise(device)
        started = time.perf_counter()
        one @ other
        synchronise(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times[2:])


def needed_products(
    shape: dict[str, int], given: int, chosen: int, members: int, *, in_full: bool
) -> float:
    """Count the multiplications and additions that a step needs.

    Each product counts for the forward pass, for the gradient of its input, and in full training
    for that of its weights; shared prefixes count once. The adapter's own products and
    recomputation do not count.
    """
    heads, size = shape["num_attention_heads"], shape["head_dim"]
    width, key_width = heads * size, shape["num_key_value_heads"] * size
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    linear = layers * hidden * (2 * width + 2 * key_width + 3 * shape["intermediate_size"])
    tokens = given + members * (chosen - 1)
    seen = given * (given + 1) / 2 + members * (chosen - 1) * (given + chosen / 2)
    head = members * chosen * hidden * shape["vocab_size"]
    passes = 3 if in_full else 2
    return 2 * (passes * (tokens * linear + head) + 3 * 2 * seen * width * layers)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    learner: "Learner | TrlLearner",
    shape: dict[str, int],
    case: tuple[int, int, int],
    device: str,
    steps: int,
    *,
    in_full: bool,
) -> dict[str, Any]:
    """Return the times and the memory of one case; running out of memory is a result too."""
    given, chosen, members = case
    found: dict[str, Any] = {"prompt": given, "reply": chosen, "members": members}
    samples = build_samples(shape["vocab_size"], *case)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    try:
        for _ in range(steps + 2):  # Two steps warm up: compilation and the optimizer's state.
            synchronise(device)
            started = time.perf_counter()
            metrics = learner.update(samples, 1)
            synchronise(device)
            times.append(time.perf_counter() - started)
    except torch.OutOfMemoryError as error:
        return found | {"error": str(error).splitlines()[0]}
    step_s = statistics.median(times[2:])
    found |= {"step_s": step_s, "loss": metrics["loss/policy"], "grad_norm": metrics["grad/norm"]}
    found["members_at_once"] = metrics.get("members_at_once", members)
    found["tokens_per_s"] = members * (given + chosen) / step_s
    found["computed_tokens_per_s"] = (given + members * chosen) / step_s
    found["products_per_s"] = needed_products(shape, *case, in_full=in_full) / step_s
    if device == "cuda":
        found["peak_mb"] = torch.cuda.max_memory_allocated() / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--train", choices=["lora", "full"], default="lora")
    parser.add_argument("--side", choices=["ours", "trl"], default="ours")
    parser.add_argument("--steps", type=int, default=5)
    default = Path(__file__).resolve().parent / "results" / "gpu_learner.json"
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.tiny:
        raise SystemExit("torch sees no GPU here; --tiny tries the same on a CPU")
    shape, cases = (TINY, TINY_CASES) if arguments.tiny else (SHAPES[arguments.shape], CASES)
    in_full = arguments.train == "full"
    rate = measured_rate(device)
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        **{package: version(package) for package in ("torch", "transformers", "peft")},
        "shape_name": "tiny" if arguments.tiny else arguments.shape,
        "shape": shape,
        "train": arguments.train,
        "side": arguments.side,
        "rank": None if in_full else RANK,
        "product_rate": rate,
        "cases": [],
    }
    for checkpointing in (False, True):
        model = build_model(shape, device, in_full=in_full)
        if arguments.side == "trl":
            from gpu_learner_trl import TrlLearner

            results["trl"] = version("trl")
            learner: Any = TrlLearner(
                model, device, autocast=precision(device), checkpointing=checkpointing
            )
        else:
            policy = build_policy(model, device, checkpointing=checkpointing)
            results["logprobs_differ_by"] = check_agreement(policy, shape["vocab_size"])
            learner = build_learner(policy)
        for case in cases:
            found = measure(learner, shape, case, device, arguments.steps, in_full=in_full)
            found["activation_checkpointing"] = checkpointing
            if "products_per_s" in found:
                found["share_of_product_rate"] = found["products_per_s"] / rate
            results["cases"].append(found)
            print(json.dumps(found), flush=True)
            arguments.output.parent.mkdir(exist_ok=True)
            arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
