"""A judge that is served by a real vLLM with a tiny model: the protocol, from start to end."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import JudgeError
from openenv_pipe.extras.judges import vllm_server
from openenv_pipe.extras.judges.judge import open_judge
from openenv_pipe.extras.judges.vllm_server import VllmJudgeClient
from openenv_pipe.models.weights import PolicyWeights
from tests.vllm_server import installed_vllm, small_config, small_policy

MESSAGES = [
    {"role": "system", "content": "You grade a letter."},
    {"role": "user", "content": "b"},
]
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"type": "string", "enum": ["good", "bad"]}},
    "required": ["verdict"],
    "additionalProperties": False,
}
pytestmark = pytest.mark.skipif(isinstance(installed_vllm(), str), reason=str(installed_vllm()))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge") / "base"
    PolicyWeights(small_policy(small_config())).write_base(folder)
    return folder


def judge_config(base, *overrides):
    given = [f"judge.model={base}", "judge.max_model_len=256", "judge.max_reply_tokens=64"]
    given.append("judge.arguments=[--enforce-eager]")  # compiling takes half of a start
    return compose(["conf=echo", "reward=ruler", "judge=vllm", *given, *overrides]).config.judge


async def ask(config, folder, num_questions=1):
    questions = [[*MESSAGES, {"role": "user", "content": str(n)}] for n in range(num_questions)]
    async with open_judge(config, folder) as judge:
        asking = (judge.ask(each, SCHEMA, str) for each in questions)
        return await asyncio.gather(*asking)


async def test_a_server_answers_by_the_schema_and_ends_with_the_judge(base, tmp_path, monkeypatch):
    started = []
    start = VllmJudgeClient._start

    async def noted(client):
        found = await start(client)
        started.append(client._server)
        return found

    monkeypatch.setattr(VllmJudgeClient, "_start", noted)
    verdicts = await ask(judge_config(base), tmp_path / "judge", num_questions=3)
    # An untrained model writes any bytes, unless a schema forbids them. It may not come to an end.
    assert all(verdict.value.startswith("{") for verdict in verdicts)
    assert all(verdict.num_calls == 1 and verdict.num_tokens > 10 for verdict in verdicts)
    (server,) = started
    assert not server.alive
    again = await ask(judge_config(base), tmp_path / "judge", num_questions=3)
    assert again == verdicts
    assert len(started) == 1  # all answers were kept, so that no server was started


async def test_a_server_that_cannot_start_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    """This Python has no vLLM."""
    here = SimpleNamespace(build="cpu", python=Path(sys.executable), package="vllm", packages={})
    monkeypatch.setattr(vllm_server, "require_installed", lambda build: here)
    with pytest.raises(JudgeError, match=r"(?s)judge's server did not start.*No module named"):
        await ask(judge_config(tmp_path), tmp_path / "judge")
