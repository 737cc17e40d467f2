"""The runner of `benchmarks/gpu_acceptance.py`: its parts, files and page."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_acceptance.py"
CASE = {"prompt": 3, "reply": 4, "members": 2, "activation_checkpointing": True}
FIGURES = {"device": "a GPU", "shape_name": "0.6b", "train": "lora", "cases": [
    CASE | {"tokens_per_s": 10.4, "share_of_product_rate": 0.25, "peak_mb": 1500.0},
    CASE | {"error": "CUDA out of memory"},
]}  # fmt: skip


@pytest.fixture(scope="module")
def acceptance():
    return runpy.run_path(str(SCRIPT))


def test_a_part_that_fails_or_hangs_is_told_and_ends(acceptance, tmp_path):
    write = f"import sys; open(sys.argv[1], 'w').write({json.dumps(FIGURES)!r})"
    commands = {
        "good": ["-c", write, "{output}"],
        "bad": ["-c", "raise SystemExit('no such GPU')"],
        "slow": ["-c", "import time; time.sleep(600)"],
    }
    results = [
        acceptance["run_part"](
            name,
            acceptance["Part"](command=command, small=None),
            tmp_path,
            small=False,
            limit_s=5.0 if name == "slow" else 120.0,
        )
        for name, command in commands.items()
    ]
    problems = [each["problem"] for each in results]
    assert problems == [None, "exit code 1", "not done within 5 s"]
    assert "no such GPU" in results[1]["output"]
    assert json.loads((tmp_path / "good.json").read_text())["figures"] == FIGURES
    page = acceptance["page"](results)
    assert "| a GPU | 0.6b | lora | 14 | yes | 10 | 25% | 1.5 GB |" in page
    assert "| a GPU | 0.6b | lora | 14 | yes | CUDA out of memory |  |  |" in page
    assert "not done within 5 s |" in page


def test_parts_name_what_exists(acceptance):
    for part in acceptance["PARTS"].values():
        for command in (part.command, part.small or ()):
            for word in command:
                if word.endswith(".py"):
                    assert (SCRIPT.parents[1] / word).exists()
