"""`export`: other libraries load the exported model and compute what the trained policy
computes."""

import json
import re
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openenv_pipe.models.load import load_policy, select_device
from openenv_pipe.runs.episodes import read_recorded_episodes
from openenv_pipe.runs.folder import RunFolder
from tests.commands import run


def test_an_adapter_is_merged_into_a_plain_folder_that_computes_the_same(adapter_run):
    folder, home = RunFolder.open(adapter_run), adapter_run.parents[2]
    code, out, err = run(home, "export", "runs/smoke/latest", "--output", "models/words")
    assert (code, out.strip()) == (0, "models/words")
    assert err.startswith("read back: logprobs after 3 prompts differ from the policy's by at most")

    policy = load_policy(
        folder.written_config.model,
        seed=folder.written_config.seed,
        device=select_device("cpu"),
        checkpoint=folder.checkpoints()[-1],
    )
    exported = AutoModelForCausalLM.from_pretrained(home / "models/words")
    token_ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        difference = exported(token_ids).logits - policy.model_logits(token_ids)
        with policy.model.disable_adapter():
            base = policy.model_logits(token_ids)
    assert difference.abs().max() < 1e-4
    assert (exported(token_ids).logits - base).abs().max() > 1e-3, "the adapter does nothing"

    tokenizer = AutoTokenizer.from_pretrained(home / "models/words")
    messages = [{"role": "user", "content": "guess"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert policy.chat.first_ids(messages) == tokenizer(rendered).input_ids
    call = {"type": "function", "function": {"name": "guess", "arguments": {"word": "crane"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert '"arguments": {"word": "crane"}' in tokenizer.apply_chat_template(
        [*messages, said], tokenize=False
    )
    card = (home / "models/words/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert folder.record.id in card
    assert " at the start (`start`) |" in card and " trained |" in card
    assert " random |" not in card
    shown = re.search(r"^(`{3,})python\n(.*)^\1$", card, re.MULTILINE | re.DOTALL)
    program = [sys.executable, "-c", shown[2]]
    ran = subprocess.run(program, cwd=home, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
    (first, *_) = read_recorded_episodes(folder.path / "episodes/step_000001.jsonl.gz", {1})
    asked = tokenizer.decode(first.episode.turns[0].prompt_ids)
    assert f"prompt = {json.dumps(asked, ensure_ascii=False)}" in shown[2]

    code, _, err = run(home, "export", "runs/smoke/latest", "--output", "models/words")
    assert code == 2
    assert "not overwritten" in err
