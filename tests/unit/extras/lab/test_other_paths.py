"""What a server offers that this program does not know."""

import pytest

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.check import other_paths

KNOWN = {path: {} for path in (*other_paths.KNOWN_PATHS, "/", "/web", "/web/step")}


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ({"paths": KNOWN}, None),
        ({"paths": {**KNOWN, "/rewind": {}, "/branches": {}}}, "offers /branches, /rewind, which"),
        ({"paths": {f"/{'x' * 300}{n}": {} for n in range(99)}}, "x and 89 more, which"),
        ({"paths": ["/rewind"]}, None),
        ({}, None),
        (None, None),
    ],
)
async def test_what_a_newer_release_adds_is_said(monkeypatch, described, says):
    async def fetch(url, path, **_):
        assert path == "/openapi.json"
        if described is None:
            raise ConfigError("status 404")
        return described

    monkeypatch.setattr(other_paths, "fetch_object", fetch)
    found = await other_paths.describe_unknown_paths("http://127.0.0.1:1")
    assert found is None if says is None else says in found
    assert len(found or "") < 1300
