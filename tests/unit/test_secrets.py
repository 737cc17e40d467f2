"""Secrets in headers are hidden, recognised by HTTP's header names, alone and inside longer
values."""

import pytest

from openenv_pipe.config.secrets import (
    assigned_secrets,
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


@pytest.mark.parametrize(
    "line",
    [
        "engine.api_key=${oc.env:OPENAI_API_KEY}",
        "host.headers.Authorization=Bearer ${oc.env:MY_TOKEN}",
        "host.headers={Authorization: 'Bearer ${oc.env:MY_TOKEN}', Accept: json}",
        "host.headers={X-Api-Key: ${oc.env:MY_TOKEN}}",
    ],
)
def test_where_a_secret_is_to_be_found_is_no_secret(line):
    assert hide_assignments(line, {}) == line
    assert assigned_secrets(line, {}) == []


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ("api_key=${oc.env:MY_TOKEN,abc-defgh}", "api_key=<hidden: api_key>"),
        ("api_key=${oc.env:MY_TOKEN}abc-defgh", "api_key=<hidden: api_key>"),
        ("h={X-Api-Key: '${oc.env:A} abc-defgh'}", "h={X-Api-Key: '<hidden: X-Api-Key>'}"),
    ],
)
def test_a_secret_beside_a_variable_is_hidden(line, hidden):
    assert hide_assignments(line, {}) == hidden


def test_a_secret_of_an_override_is_hidden_once_and_comes_back_in_its_quotes(monkeypatch):
    line = "host.headers={Authorization: 'Bearer abc, defgh'}"
    hidden = hide_assignments(line, {})
    assert hidden == "host.headers={Authorization: '<hidden: Authorization>'}"
    assert hide_assignments(hidden, {}) == hidden
    ((name, value),) = assigned_secrets(line, {})
    monkeypatch.setenv(name, value)
    assert restore_in_config(hidden) == line


def test_a_variable_that_the_shell_has_replaced_is_hidden_under_its_own_name(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "abc-defgh-ijk")
    line = "host.headers.Authorization=Bearer abc-defgh-ijk"
    hidden = hide_assignments(line, known_secrets({}))
    assert hidden == "host.headers.Authorization=Bearer <hidden: MY_TOKEN>"
    assert restore_in_config(hidden) == line
