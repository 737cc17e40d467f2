"""Secrets are recognised by names, hidden in three forms, and rejected where HTTP rejects them."""

import base64
import os
from urllib.parse import quote

import pytest
from pydantic import ValidationError

from openenv_pipe.config.compose import compose
from openenv_pipe.config.secrets import (
    assigned_secrets,
    hide_assignments,
    hide_in_config,
    is_secret_name,
    known_secrets,
    restore_in_config,
    unwritten_secrets,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.secrets import named_secrets, redact, remember_secrets

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        *("Authorization", "Proxy-Authorization", "X-Api-Key", "Cookie", "x-auth-token", "api_key"),
        *("X-Functions-Key", "OPENAI_KEY", "AWS_ACCESS_KEY_ID", "DB_PWD", "SSH_PASSPHRASE"),
        *("SENTRY_DSN", "DATABASE_URL", "ID_JWT", "DOCKER_AUTH_CONFIG", "OTLP_HEADERS"),
        *("STORAGE_CONNECTION_STRING", "DB_PASS", "SLACK_WEBHOOK_URL", "HOOK_WEBHOOK"),
    ],
)
def test_headers_that_are_secrets_are_known_by_their_names(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("Accept", "max_reply_tokens", "authorizations", "X-Trace-Id", "PWD", "index_key"),
        *("KEYMAP", "headers", "SSH_AUTH_SOCK", "COMPASS", "webhook_urls"),
    ],
)
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


def test_the_password_of_a_url_from_the_environment_comes_back(monkeypatch):
    monkeypatch.setenv("CACHE", "redis://me:pass-word@host/0")
    config = {"env": {"variables": {"CACHE": "redis://me:pass-word@host/0"}}}
    hidden = hide_in_config(config, known_secrets(config))
    assert "pass-word" not in str(hidden)
    assert restore_in_config(hidden) == config


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
        "engine.api_key=null trainer.steps=3",
        "engine={api_key: null}",
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
        ("api_key=null-abc-defgh", "api_key=<hidden: api_key>"),
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


SECRET = "s3cr\u00e9t/+\"'&=value"


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", SECRET)


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        quote(SECRET, safe=""),
        base64.b64encode(SECRET.encode()).decode(),
    ],
)
def test_a_secret_is_redacted_as_it_is_quoted_for_urls_and_in_base64(form, secret):
    assert redact(f"<{form}>") == "<<hidden: MY_TOKEN>>"


def test_a_header_that_a_library_rejects_is_never_quoted():
    """A token of a file, such as a kubeconfig's, is not known to this program."""
    text = "Invalid header value b'Bearer it\\'s-mine\\n' of 1; Illegal header value b\"x'y\\n\"."
    assert redact(text) == "Invalid header value <hidden> of 1; Illegal header value <hidden>."


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("Authorization", "Bearer abc-defgh", {"Bearer abc-defgh", "abc-defgh"}),
        (
            "Authorization",
            "Basic " + base64.b64encode(b"me:password1").decode(),
            {"Basic bWU6cGFzc3dvcmQx", "bWU6cGFzc3dvcmQx", "password1"},
        ),
        ("Cookie", "session=abcdefgh; a=b", {"session=abcdefgh; a=b", "abcdefgh"}),
        ("url", "postgres://me:password1@host/db", {"me:password1", "password1"}),
        ("url", "https://ghp_abcdefgh@host/x", {"ghp_abcdefgh"}),
        ("url", "https://host/x?a=12345678&api_key=abcdefgh#f", {"abcdefgh"}),
        ("command", "--api-key=abcdefgh", {"abcdefgh"}),
        ("api_key", "<hidden: OPENAI_API_KEY>", set()),
        ("password", "short", set()),
    ],
)
def test_secrets_in_parts_of_values(name, text, values):
    assert set(named_secrets([(name, text)])) == values


@pytest.mark.parametrize(
    "config",
    [
        {"command": ["serve", "--token", "first-key", "--url", "https://me:second-key@h/x"]},
        {"a": {"api_key": "first-key"}, "b": {"api_key": "second-key"}},
    ],
    ids=["options", "two of one name"],
)
def test_secrets_of_a_configuration_are_hidden_and_come_back(monkeypatch, config):
    hidden = hide_in_config(config, known_secrets(config))
    assert "first-key" not in str(hidden) and "second-key" not in str(hidden)
    for name, value in unwritten_secrets(config).items():
        monkeypatch.setenv(name, value)
    assert restore_in_config(hidden) == config


def test_a_secret_has_the_name_of_the_variable_that_it_came_from(monkeypatch):
    monkeypatch.setenv("OF_THE_ENDPOINT", "sk-abc-defgh")
    config = {"api_key": "sk-abc-defgh"}
    assert hide_in_config(config, known_secrets(config)) == {"api_key": "<hidden: OF_THE_ENDPOINT>"}


def test_a_short_secret_comes_back_from_the_variable_that_it_came_from(monkeypatch):
    monkeypatch.setenv("OPENENV_PIPE_TOKEN", "abc")
    config = {"agent": {"token": "abc"}}
    hidden = hide_in_config(config, known_secrets(config))
    assert hidden == {"agent": {"token": "<hidden: OPENENV_PIPE_TOKEN>"}}
    assert restore_in_config(hidden) == config and unwritten_secrets(config) == {}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\0", "\x1b[0m", "\u200b", "\x7f", "\n\n "])
@pytest.mark.parametrize("key", ["engine.api_key", "host.headers.Authorization"])
def test_what_http_rejects_is_rejected_by_name_and_never_shown(monkeypatch, key, end):
    if "\0" not in end:
        monkeypatch.setitem(os.environ, "MINE", f"abc-defgh{end}")
    value = "${oc.env:MINE}" if "\0" not in end else f"abc-defgh{end}"
    parts = ["host=attach", "host.urls=[http://h]"]
    if key == "engine.api_key":
        parts += ["engine=openai", "engine.model=m", "engine.base_url=http://h/v1"]
    with pytest.raises(ConfigError) as rejected:
        compose(["conf=echo", *parts, f"{key}='{value}'"])
    text = str(rejected.value)
    assert text.startswith(f"{key}: ") and f"U+{ord(end[0]):04X}" in text
    if end[0] in "\r\n\u200b":  # other control characters are rejected in every text
        assert "it comes from the environment variable MINE" in text
    assert "abc-defgh" not in text


@pytest.mark.parametrize("name", ["A B", "A:B", "A\nB", "\u00c4", ""])
def test_what_is_no_name_of_a_header_is_rejected(name):
    host = compose(["conf=echo", "host=attach", "host.urls=[http://h]"]).config.host
    with pytest.raises(ValidationError, match="not the name of an HTTP header"):
        type(host).model_validate({**host.model_dump(), "headers": {name: "x"}})


def test_remembered_secrets_are_redacted_until_the_process_ends():
    remember_secrets({"remembered-value": "name"})
    assert redact("a remembered-value") == "a <hidden: name>"
