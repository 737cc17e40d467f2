"""bfloat16 where the machine has instructions for it, else float32; and a word where it has not."""

from pathlib import Path

import pytest

from openenv_pipe.config import precision
from openenv_pipe.config.compose import compose
from openenv_pipe.config.precision import fast_precision, warn_of_precision

WITH = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n"
WITHOUT = "processor\t: 0\nflags\t\t: fpu avx2 avx512f f16c\nbugs\t\t: avx512_bf16\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that pretends a processor and a GPU's device file."""

    def pretend(flags: str | None, *, gpu: bool = False) -> None:
        precision._has_instructions.cache_clear()
        file, device = tmp_path / "cpuinfo", tmp_path / "nvidiactl"
        for path, text in ((file, flags), (device, "" if gpu else None)):
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
        monkeypatch.setattr(precision, "CPU_INFO", file)
        monkeypatch.setattr(precision, "GPU_DEVICES", (device,))

    yield pretend
    precision._has_instructions.cache_clear()


@pytest.mark.parametrize(
    ("flags", "gpu", "device", "expected"),
    [
        (WITH, False, "auto", "bfloat16"),
        (WITH, False, "cpu", "bfloat16"),
        (WITHOUT, False, "auto", "float32"),
        (WITHOUT, False, "cpu", "float32"),
        (WITHOUT, True, "auto", "bfloat16"),
        (WITHOUT, True, "cpu", "float32"),
        (WITHOUT, False, "cuda", "bfloat16"),
        (None, False, "auto", "float32"),
    ],
)
def test_the_precision_that_the_machine_is_fast_in(machine, flags, gpu, device, expected):
    machine(flags, gpu=gpu)
    assert fast_precision(device) == expected


@pytest.mark.parametrize(("flags", "expected"), [(WITH, "bfloat16"), (WITHOUT, "float32")])
def test_experiments_and_models_follow_the_machine(machine, flags, expected):
    machine(flags)
    hub = compose(["conf=echo", "model=hub", "model.path=a/b", "device=cpu"]).config.model
    assert (hub.dtype, hub.autocast) == (expected, expected)
    for model in ([], ["model=smollm2_135m"]):
        for experiment in ("sums", "wordle", "frozen_lake"):
            config = compose([f"conf={experiment}", *model, "device=cpu"]).config
            assert config.model.autocast == expected


def test_no_shipped_experiment_names_bfloat16_for_every_machine():
    root = Path(__file__).parents[2] / "conf"
    fixed = [
        path.relative_to(root).as_posix()
        for folder in ("model", "conf")
        for path in (root / folder).rglob("*.yaml")
        if "autocast: bfloat16" in path.read_text()
    ]
    assert not fixed


def test_an_explicit_precision_wins_and_is_warned_of_where_it_is_slow(machine):
    machine(WITHOUT)
    config = compose(["conf=sums", "device=cpu", "model.autocast=bfloat16"]).config
    assert config.model.autocast == "bfloat16"
    assert "set model.autocast=float32" in warn_of_precision(config)
    assert warn_of_precision(compose(["conf=sums", "device=cpu"]).config) is None
    machine(WITH)
    assert warn_of_precision(config) is None
