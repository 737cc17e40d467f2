"""Programs of others get the variables of an allowlist, and those that the configuration names."""

import ast
import os
import sys
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.server_command import process_environment
from openenv_pipe.environments.hosts.process import ProcessHost
from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.extras.containers.kubernetes.manifests import container
from openenv_pipe.pipeline.requirements import check_requirements
from openenv_pipe.system.child_environment import (
    DOCKER,
    child_environment,
    given_variables,
    names_left_out,
)
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.secrets import redact

CREDENTIALS = {
    "DATABASE_URL": "postgres://me:pass-word@host/db",
    "PGSERVICE": "pass-word",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic pass-word",
    "SENTRY_DSN": "https://pass-word@sentry.example/1",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountKey=pass-word",
    "DOCKER_AUTH_CONFIG": '{"auths": "pass-word"}',
    "SESSION_JWT": "eyJhbGciOi.eyJzdWIiOi.pass-word",
    "SSH_AUTH_SOCK": "/pass-word",
    "HF_TOKEN": "pass-word",
    "PIP_INDEX_URL": "https://me:pass-word@index.example/simple",
    "KUBECONFIG": "/pass-word",
    "NOBODY_HAS_HEARD_OF_IT": "pass-word",
    # names that are allowed, with a value that is not
    "HTTPS_PROXY": "http://me:pass-word@proxy:3128",
    "http_proxy": "me:pass-word@proxy:3128",
    "ALL_PROXY": "socks5h://me:pass/word-pass-word@proxy",
    "HF_ENDPOINT": "https://me:pass-word@mirror.example",
    "HF_HUB_URL": "https://mirror.example/models?token=pass-word",
    "HF_HUB_TOKEN": "pass-word",
    "OMP_PASSWORD": "pass-word",
    "XDG_SESSION": "eyJhbGciOi.eyJzdWIiOi.pass-word",
    "VLLM_API_KEY": "pass-word",
}
NEEDED = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/home/me",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "Europe/Berlin",
    "XDG_CACHE_HOME": "/cache",
    "PYTHONHASHSEED": "0",
    "LD_LIBRARY_PATH": "/lib",
    "CUDA_VISIBLE_DEVICES": "0",
    "OMP_NUM_THREADS": "2",
    "SSL_CERT_FILE": "/ca.pem",
    "no_proxy": "localhost,@inside",
    "https_proxy": "http://proxy:3128",
    "HF_HOME": "/hub",
    "HF_HUB_OFFLINE": "1",
}
PACKAGE = Path(__file__).parents[2] / "openenv_pipe"
OWN_CODE = {  # processes that run this package's own code, which inherit all variables
    "extras/containers/docker/start_guard.py",
    "extras/containers/docker/socket_proxy.py",  # in a container, with the container's
    "extras/devices/workers.py",
    "extras/sweeps/worker.py",
    "extras/viewer/web/scoring.py",
    "system/process.py",
}


@pytest.fixture
def ours(monkeypatch):
    """Give this process credentials, and what a process needs."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in (CREDENTIALS | NEEDED).items():
        monkeypatch.setenv(name, value)


def test_no_credential_is_passed_whatever_its_name(ours):
    assert child_environment() == NEEDED


def test_a_program_gets_its_own_credentials_and_no_others(ours):
    of_docker = {name for name, value in child_environment(*DOCKER).items() if "word" in value}
    own = {"DOCKER_AUTH_CONFIG", "SSH_AUTH_SOCK", "HTTPS_PROXY", "http_proxy", "ALL_PROXY"}
    assert of_docker == own


def test_a_vllm_server_gets_the_hub_s_token_only_for_a_model_of_the_hub(ours, tmp_path):
    of_a_folder, of_a_hub = (
        process_environment(each, {}) for each in (str(tmp_path), "some/model")
    )
    assert "pass-word" not in str(of_a_folder)
    assert {name for name, value in of_a_hub.items() if "word" in value} == {"HF_TOKEN"}


def test_a_pod_gets_what_the_configuration_names(ours):
    overrides = (
        "host=kubernetes",
        "host.image=i",
        "env.variables={DATABASE_URL: null, MOOD: merry}",
    )
    config = compose(["conf=echo", *overrides]).config
    variables = {each["name"]: each["value"] for each in container(config.env, config.host)["env"]}
    assert variables == {
        "MAX_CONCURRENT_ENVS": variables["MAX_CONCURRENT_ENVS"],
        "PYTHONUNBUFFERED": "1",
        "DATABASE_URL": CREDENTIALS["DATABASE_URL"],
        "MOOD": "merry",
    }


async def test_a_server_gets_no_credential_and_its_error_names_what_it_lacks(tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PGSERVICE", "of-this-server")
    script = "import os; print(dict(os.environ)); os.environ['DATABASE_URL']"
    command = f'env.command=["{sys.executable}", -c, "{script}"]'
    config = compose(["conf=echo", command, "env.variables={PGSERVICE: null}"]).config
    host = ProcessHost(config.env, config.host, tmp_path)
    with pytest.raises(HostError) as failed:
        await host.start()
    log = (tmp_path / "env-0.log").read_text()
    assert "KeyError: 'DATABASE_URL'" in log and "pass-word" not in log
    assert "'PGSERVICE': '<hidden: PGSERVICE>'" in log
    message = str(failed.value)
    assert message.startswith("env 'echo': the server died before it was ready: exit code 1: KeyE")
    names = message.partition("not passed to it: ")[2].partition(";")[0].split(", ")
    assert "PGSERVICE" not in names and "DATABASE_URL" in names
    assert f"env.variables={{{names[0]}: null}} would pass one on" in message


def test_only_variables_that_a_process_speaks_of_are_named(monkeypatch):
    monkeypatch.setattr(os, "environ", {"A_1": "x", "A_2": "x", "A_3": "x", "_": "x"})
    assert names_left_out({"A_1": "x"}, "_ A_1 A_4 A_22", "x") == ""
    note = names_left_out({"A_1": "x"}, "no A_3 and no $A_2", "x.variables")
    assert note.endswith("to it: A_2, A_3; x.variables={A_2: null} would pass one on")
    assert names_left_out({}, "A_3", None).endswith("passed to it: A_3")


def test_a_variable_that_is_passed_on_is_in_no_configuration_and_no_text(monkeypatch):
    monkeypatch.setenv("PLAIN_NAME", "a-value-of-a-user")
    config = compose(["conf=echo", "env.variables={PLAIN_NAME: null}"]).config
    assert config.model_dump()["env"]["variables"] == {"PLAIN_NAME": None}
    assert given_variables(config.env.variables, "k") == {"PLAIN_NAME": "a-value-of-a-user"}
    assert redact("it is a-value-of-a-user") == "it is <hidden: PLAIN_NAME>"


@pytest.mark.parametrize(
    "key", ["env.variables", "agent.variables", "engine.variables", "judge.variables"]
)
def test_a_variable_that_is_not_set_is_named_before_a_run_starts(key):
    groups = ["agent=program", "agent.command=[sh]", "engine=vllm", "judge=vllm", "judge.model=m"]
    config = compose(["conf=echo", *groups, f"{key}={{NOT_SET_HERE: null}}"]).config
    assert isinstance(config.engine, VllmEngineConfig)
    with pytest.raises(ConfigError, match=rf"{key}\.NOT_SET_HERE is null.*set it, or remove"):
        check_requirements(config, makes_folder=False)


def calls_with_an_environment(path):
    """Yield the text of each call that starts a process, and that of its environment."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("ManagedProcess", "Popen", "create_subprocess_exec") or (
                ast.unparse(node.func) == "subprocess.run"
            ):
                given = [each.value for each in node.keywords if each.arg in ("env", "environment")]
                yield ast.unparse(node)[:80], ast.unparse(given[0]) if given else "os.environ"


def test_only_own_code_is_started_with_all_variables():
    """A call without an environment inherits all."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for call, environment in calls_with_an_environment(path):
            assert name in OWN_CODE or "os.environ" not in environment, (name, call)
            found.add(name)
    assert found > OWN_CODE


def test_processes_get_exactly_their_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THIS_PROCESS", "x")
    code = "import os; print(sorted(os.environ))"
    process = ManagedProcess(
        [sys.executable, "-c", code], log=tmp_path / "log", environment={"GIVEN": "1"}
    )
    assert process.wait(60.0) == 0
    process.stop(0.0)
    names = ast.literal_eval((tmp_path / "log").read_text())
    assert {*names} - {"LC_CTYPE"} == {"GIVEN"}
