"""The runner of `benchmarks/gpu_acceptance.py`: its parts, files and page."""

import json
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_acceptance.py"
CASE = {"prompt": 3, "reply": 4, "members": 2, "activation_checkpointing": True}
FIGURES = {"device": "a GPU", "shape_name": "0.6b", "train": "lora", "side": "ours", "cases": [
    CASE | {"tokens_per_s": 10.4, "share_of_product_rate": 0.25, "peak_mb": 1500.0},
    CASE | {"error": "CUDA out of memory"},
]}  # fmt: skip


PUBLISHED = {"published": [
    {"device": "cuda", "publish": "full", "transfer": "ipc", "bytes": 1.2e9, "median_ms": 60.0}
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
    results[1]["figures"] = PUBLISHED
    page = acceptance["page"](results)
    assert "| cuda | full | ipc | 1200.0 | 60 | 20000 |" in page
    assert "| a GPU | 0.6b | lora | ours | 14 | yes | 10 | 25% | 1.5 GB |" in page
    assert "| a GPU | 0.6b | lora | ours | 14 | yes | CUDA out of memory |  |  |" in page
    assert "not done within 5 s |" in page
    theirs = results[0] | {"figures": FIGURES | {"side": "trl", "trl": "1.0"}}
    assert "| a GPU | 0.6b | lora | TRL 1.0 | 14 |" in acceptance["page"]([theirs])


def test_parts_that_need_two_gpus_run_when_they_are_named(acceptance):
    named = [name for name, part in acceptance["PARTS"].items() if not part.is_default]
    assert named == ["publish-broadcast"]
    assert "ipc" not in acceptance["PARTS"]["publish"].small  # shares memory of a GPU


def test_parts_name_what_exists(acceptance):
    for part in acceptance["PARTS"].values():
        for command in (part.command, part.small or ()):
            for word in command:
                if word.endswith(".py"):
                    assert (SCRIPT.parents[1] / word).exists()
