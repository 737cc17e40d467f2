"""Secrets of headers: by the names that HTTP gives them, whole and inside longer values."""

import pytest

from openenv_pipe.runs.hidden import (
    hide_assignments,
    hide_in_config,
    is_secret_name,
    known_secrets,
    restore_in_config,
)


@pytest.mark.parametrize(
    "name",
    ["Authorization", "Proxy-Authorization", "X-Api-Key", "Cookie", "x-auth-token", "api_key"],
)
def test_headers_that_are_secrets_are_known_by_their_names(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["Accept", "max_reply_tokens", "authorizations", "X-Trace-Id"])
def test_other_names_are_not(name):
    assert not is_secret_name(name)


def test_a_header_from_the_environment_is_hidden_and_comes_back(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "abc-defgh-ijk")
    config = {"host": {"headers": {"Authorization": "Bearer abc-defgh-ijk", "Accept": "json"}}}
    secrets = known_secrets(config)
    hidden = hide_in_config(config, secrets)
    headers = {"Authorization": "Bearer <hidden: MY_TOKEN>", "Accept": "json"}
    assert hidden == {"host": {"headers": headers}}
    assert restore_in_config(hidden) == config
    line = "host.headers.Authorization=Bearer abc-defgh-ijk"
    assert "abc-defgh-ijk" not in hide_assignments(line, secrets)


def test_a_header_from_nowhere_is_hidden_by_its_own_name():
    config = {"headers": {"X-Api-Key": "written-in-yaml"}}
    secrets = known_secrets(config)
    assert hide_in_config(config, secrets) == {"headers": {"X-Api-Key": "<hidden: X-Api-Key>"}}
    assert "written-in-yaml" not in hide_assignments("asked with written-in-yaml", secrets)


@pytest.mark.parametrize(
    "line",
    [
        "host.headers.Authorization=Bearer abc-defgh",
        "host.headers={Authorization: 'Basic abc-defgh'}",
        "host.headers={X-Api-Key: abc-defgh}",
    ],
)
def test_an_override_is_hidden_without_knowing_the_secret(line):
    assert "abc-defgh" not in hide_assignments(line, {})
