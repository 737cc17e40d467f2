"""The command `models`: every name of `conf/model/` is listed, and each can be fetched."""

import asyncio

import pytest

from openenv_pipe.extras.models import command
from openenv_pipe.extras.models.command import fetch_model, models_table
from openenv_pipe.system.resources import group_options

pytestmark = pytest.mark.slow


def test_every_shipped_model_is_listed_with_its_path_or_its_origin(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = {row[0]: row[1:] for row in models_table().rows}
    assert set(rows) == set(group_options("model"))
    without_path = {name: where for name, (path, where) in rows.items() if not path}
    assert without_path == {
        "hub": "no value for model.path; add model.path=<text>",
        "tiny": "built from a seed",
    }


def test_a_model_is_fetched_by_its_name_or_its_id_on_the_hub(monkeypatch):
    asked = []

    async def provide(model, notify):
        asked.append(model.path)

    monkeypatch.setattr(command, "provide_model", provide)
    monkeypatch.setattr(command, "download_missing", lambda model: None)
    monkeypatch.setattr(command, "find_model_folder", lambda model: None)
    for name in ("qwen3_0_6b", "Qwen/Qwen3-0.6B"):
        assert asyncio.run(fetch_model(name, print)) is None
    assert asked == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"]
