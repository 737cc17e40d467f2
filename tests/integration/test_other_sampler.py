"""A sampler that holds another policy than the trainer, and one whose logprobs are a little off."""

from openenv_pipe.extras.viewer.web.run_page import describe_progress
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import SMALL, run

ENGINE = """
from dataclasses import replace

from openenv_pipe.engines.local import LocalEngine


class Shifted(LocalEngine):
    \"\"\"The local engine, whose logprobs are off by a constant, as those of another policy.\"\"\"

    def __init__(self, setup, *, shift):
        super().__init__(setup.policy, max_episodes=64, executor=setup.executor)
        self._shift = shift

    async def generate(self, request):
        done = await super().generate(request)
        return replace(done, logprobs=[each - self._shift for each in done.logprobs])
"""


def train(folder, shift):
    """Train two steps of echo with a shift of the sampler's logprobs."""
    (folder / "shifted.py").write_text(ENGINE)
    engine = [
        "engine=python",
        "engine.target=shifted:Shifted",
        f"engine.options={{shift: {shift}}}",
    ]
    small = ["trainer.steps=2", "eval.num_tasks=2", "eval.baselines=false", *SMALL]
    code, _, err = run(folder, "train", "conf=echo", *engine, *small)
    return code, err, RunFolder.open(folder / "runs" / "echo" / "0001")


def test_a_step_that_another_policy_has_sampled_ends_the_run(tmp_path):
    code, err, folder = train(tmp_path, 0.5)
    assert code == 1 and "Traceback" not in err
    assert "error: step 1: the logprobs of sampler and trainer differ by 0.5 nats" in err
    assert "trainer.max_mismatch=0.02" in err and "the usual causes" in err
    assert folder.status == "failed" and "max_mismatch" in folder.record.cause
    assert read_metrics(folder.metrics_path) == [] and folder.checkpoints() == []
    assert "differ by 0.5 nats" in (folder.path / "report.md").read_text()


def test_a_smaller_mismatch_is_said_at_once_in_terminal_report_and_viewer(tmp_path):
    code, err, folder = train(tmp_path, 0.01)
    assert code == 0, err
    assert err.count("alarm: In step 1, the logprobs of sampler and trainer differ by 0.01 ") == 1
    assert "**Alarm:** In step 2, the logprobs" in (folder.path / "report.md").read_text()
    alarms = describe_progress(RunStore(tmp_path / "runs"), "echo/0001")["alarms"]
    assert "mismatch/max" in [alarm["metric"] for alarm in alarms]
