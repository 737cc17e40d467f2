"""Runs that tests of several files use."""

import pytest

from tests.commands import SMALL, run


@pytest.fixture(scope="session")
def adapter_run(tmp_path_factory):
    """The run folder of one training step with an adapter and a reference."""
    folder = tmp_path_factory.mktemp("adapter")
    adapter = ("model.lora.rank=4", "trainer.loss.kl.coef=0.1", "trainer.optimizer.lr=0.05")
    code, _, err = run(folder, "train", "conf=smoke", "trainer.steps=1", *adapter, *SMALL)
    assert code == 0, err
    return folder / "runs" / "smoke" / "0001"
