"""The steps of docs/ci.md fit together: what GitHub would run in a shell is run here."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "docs/ci.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
JOB = yaml.safe_load(next(code for kind, code in BLOCKS if kind == "yaml"))["jobs"]["agent"]


def shell(script: str, folder: Path) -> None:
    """Run a script as GitHub does with `shell: bash`."""
    variables = {**os.environ, "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
    subprocess.run(command, cwd=folder, env=variables, check=True)


@pytest.mark.parametrize("has_run", [False, True])
def test_the_summary_has_the_verdicts_and_the_report_of_what_ran(tmp_path, has_run):
    """A step before it may have failed, so it fails on nothing that is missing."""
    (step,) = (step for step in JOB["steps"] if step.get("if") == "always()" and "run" in step)
    if has_run:
        for path, text in (
            ("results/eval.txt", "eval  reward\nFAIL my_env/0001 step_000060: reward 0.5 < 0.6\n"),
            ("runs/my_env/latest/report.md", "# my_env/0001\n"),
        ):
            (tmp_path / path).parent.mkdir(parents=True)
            (tmp_path / path).write_text(text)
    shell(step["run"], tmp_path)
    shown = (tmp_path / "summary.md").read_text()
    expected = "- FAIL my_env/0001 step_000060: reward 0.5 < 0.6\n# my_env/0001\n"
    assert shown == (expected if has_run else "")
    assert JOB["defaults"]["run"]["shell"] == "bash"


def test_a_release_is_unpacked_where_it_is_evaluated(tmp_path):
    lines = "\n".join(code for kind, code in BLOCKS if kind == "bash")
    (pack,) = re.findall(r"^tar czf [^&]*", lines, re.MULTILINE)
    (unpack,) = re.findall(r"^mkdir .*tar xzf .*", lines, re.MULTILINE)
    (evaluated,) = re.findall(r"openenv-pipe eval (released/\S+)", lines)
    run = tmp_path / "runs/my_env/0001"
    run.mkdir(parents=True)
    (run / "run.json").touch()
    shell(f"{pack}\n{unpack}", tmp_path)
    assert (tmp_path / evaluated / "run.json").is_file()
