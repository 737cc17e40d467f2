"""Generate one token with random weights, to check that this environment's vLLM works.

    python openenv_pipe_check.py FOLDER BUILD

`install.py` runs this program with the new environment's Python, so it imports nothing of
openenv_pipe. FOLDER is an empty folder, into which the model is written.
"""

import json
import os
import sys
from pathlib import Path

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def main() -> None:
    folder, build = Path(sys.argv[1]), sys.argv[2]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # All of vLLM in this process: if a signal ends it, the exit code says which.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    (folder / "config.json").write_text(json.dumps(MODEL))
    model = LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32" if build == "cpu" else "auto",
        distributed_executor_backend="uni",
        max_model_len=32,
        max_num_seqs=2,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
    )
    settings = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True)
    (answer,) = model.generate([{"prompt_token_ids": [1, 2, 3]}], settings, use_tqdm=False)
    print("generated", list(answer.outputs[0].token_ids))


if __name__ == "__main__":  # vLLM's processes import this file
    main()
