"""The command line as a user sees it: processes, exit codes, and what is printed where."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic_core import SchemaError

from openenv_pipe.cli import main as cli
from openenv_pipe.cli.completion import complete_override, offer_completion
from openenv_pipe.cli.logs import configure_logging
from openenv_pipe.errors import ConfigError, EngineMissingError, HostError
from openenv_pipe.runs.places import FORMAT
from openenv_pipe.system import resources

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def openenv_pipe(tmp_path):
    """Return a function that runs the command in an empty folder, away from the checkout."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "openenv_pipe.cli.main", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **variables},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def called(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command in this process, in an empty folder.

    It returns the exit code, and what is printed to the output and to the errors.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_the_commands_and_loads_nothing_heavy(arguments, tmp_path):
    run = tmp_path / "runs/echo/0001/run.json"
    run.parent.mkdir(parents=True)
    record = {"format": FORMAT, "purpose": "training", "created": "", "status": "finished"}
    run.write_text(json.dumps(record))
    code = (
        "import sys\n"
        "from openenv_pipe.cli import main as cli\n"
        f"try:\n    cli.main({arguments})\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'vllm', 'hydra', 'numpy', 'pydantic'}\n"
        "    assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == (0 if arguments else 2), result.stderr
    for each in ("demo", "train", "eval", "show", "check", "runs", "version"):
        assert each in result.stdout


def test_alone_it_names_the_first_command(called):
    _, printed, _ = called()
    assert printed.partition("next:\n")[2].startswith("  openenv-pipe demo ")


@pytest.mark.parametrize("command", ["train", "plugins", "env", "engine", "judge", "episodes"])
def test_every_command_explains_itself(called, command):
    code, printed, _ = called(command, "--help")
    assert code == 0
    assert f"\n openenv-pipe {command}" in printed  # an example


def test_help_is_wrapped_by_the_terminal_and_not_by_the_code(called, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = [line.rstrip() for line in called("view", "--help")[1].splitlines()]
    assert " Prints a link with an access token, and serves until Ctrl-C; with --bundle," in shown
    assert " openenv-pipe view" in shown


def test_version(openenv_pipe):
    assert re.fullmatch(r"openenv-pipe \d+\.\d+\.\d+\n", openenv_pipe("--version").stdout)


def test_show_prints_plain_yaml_with_origins(openenv_pipe):
    result = openenv_pipe("show", "conf=wordle", "trainer.steps=3")
    assert result.returncode == 0
    assert yaml.safe_load(result.stdout)["trainer"]["steps"] == 3
    assert "override trainer.steps=3" in result.stdout
    assert "\x1b" not in result.stdout


def test_show_as_json_is_what_a_run_folder_keeps(called):
    values = json.loads(called("show", "conf=echo", "--format", "json")[1])
    assert values["env"]["name"] == "echo"
    assert values["num_threads"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show"], "tic_tac_toe, wordle"),
        (["train", "conf=wordle", "trainer.stpes=1"], "did you mean trainer.steps"),
        (["eval", "runs/wordle/0007"], "'runs/wordle/0007' is not a folder"),
        (["runs"], "openenv-pipe train conf=wordle"),
        (["watch"], "`openenv-pipe demo`"),
        (["show", "conf=nope"], "`openenv-pipe env new NAME`"),
        (["env", "play", "nope"], "`openenv-pipe env find`"),
        (["compare"], "openenv-pipe compare wordle/0003"),
        (["train", "--conf", "echo"], "as in conf=NAME"),
        (["shw"], "Did you mean 'show'"),
    ],
)
def test_mistakes_exit_2_with_a_message_and_no_traceback(called, arguments, expected):
    code, printed, errors = called(*arguments)
    assert (code, printed) == (2, "")
    assert expected in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ConfigError("mend this"), 2, "error: mend this\n"),
        (HostError("it died"), 1, "error: it died\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(called, monkeypatch, error, code, shown):
    def fail(_):
        raise error

    monkeypatch.setattr("openenv_pipe.config.compose.compose", fail)
    assert called("show", "conf=wordle") == (code, "", shown)


def test_our_own_bugs_keep_their_traceback_without_secrets(called, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789")

    def fail(_):
        raise ZeroDivisionError("by tok-0123456789\x1b[2J")

    monkeypatch.setattr("openenv_pipe.config.compose.compose", fail)
    code, _, shown = called("show", "conf=wordle")
    assert code == 1
    assert shown.startswith("Traceback") and ", in fail\n" in shown
    assert shown.endswith("ZeroDivisionError: by <hidden: MY_TOKEN>\\u001b[2J\n")


def test_ctrl_c_inside_of_a_library_ends_without_a_traceback(capsys):
    def interrupted():
        raise SchemaError('Error building "definitions" validator:\n  KeyboardInterrupt: ')

    assert cli.exit_code_of(interrupted) == 130
    assert capsys.readouterr().err == ""


def test_an_error_that_only_names_ctrl_c_is_shown(capsys):
    def failing():
        raise ValueError("KeyboardInterrupt")

    assert cli.exit_code_of(failing) == 1
    assert "ValueError: KeyboardInterrupt" in capsys.readouterr().err


def test_show_prints_marks_and_no_secrets(called, monkeypatch):
    """A literal key, headers, and the overrides that are shown as origins."""
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789")
    overrides = [
        *("conf=echo", "engine=openai", "engine.model=m", "engine.api_key=sk-0123456789"),
        *("engine.base_url=http://h/v1", "host=attach", "host.urls=[http://h]"),
        "host.headers={Authorization: 'Bearer ${oc.env:MY_TOKEN}', X-Api-Key: short}",
    ]
    for form in ("yaml", "json"):
        _, shown, _ = called("show", *overrides, "--format", form)
        assert "<hidden: api_key>" in shown and "Bearer <hidden: MY_TOKEN>" in shown
        for secret in ("sk-0123456789", "tok-0123456789", "short"):
            assert secret not in shown


@pytest.mark.parametrize(
    "override",
    [
        "engine.api_key=sk-0123456789,sk-9876543210",
        "engine.api_key=[sk-0123456789]",
        "engine.api_key={sk-0123456789",
        "engine.api_key='sk-0123456789",
        "engine.api_kei=sk-0123456789",
        "engine.apikey=sk-0123456789",
        "host.headers=[sk-0123456789]",
        "host.headers='Authorization: sk-0123456789'",
        "host.headers={'Not a name': sk-0123456789}",
        "host.headers.Authorization=[sk-0123456789]",
        "host.urls=['https://user:sk-0123456789@h']",
        "engine.base_url=https://h/v1?api_key=sk-0123456789",
        "env.variables=[sk-0123456789]",
        "hydra.api_key=sk-0123456789",
    ],
)
def test_an_override_that_is_wrong_is_rejected_without_its_secret(override, called):
    engine = ("engine=openai", "engine.model=m", "engine.base_url=http://h/v1", "host=attach")
    code, *shown = called("show", "conf=echo", *engine, "host.urls=[http://h]", override)
    assert code == 2
    assert "0123456789" not in "".join(shown)


@pytest.mark.parametrize(("answer", "code", "builds"), [("y\n", 0, ["cpu"]), ("\n", 2, [])])
def test_a_missing_engine_is_offered_on_a_terminal(monkeypatch, answer, code, builds):
    """Once it is installed, the command begins again."""
    installed: list[str] = []

    def run(arguments, **_):
        if arguments[:2] == ["engine", "install"]:
            installed.append(arguments[-1])
            return
        if not installed:
            raise EngineMissingError("vLLM (cpu) is not installed", "cpu")
        sys.exit(0)

    run.registered_groups = cli.app.registered_groups
    monkeypatch.setattr(cli, "app", run)
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert (ended.value.code, installed) == (code, builds)


# --- completion --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("case", ["terminal", "pipe", "CI", "notebook", "installed", "read-only"])
def test_completion_is_offered_once_in_a_terminal(case, tmp_path, monkeypatch):
    for name in ("CI", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if case in ("CI", "notebook"):
        monkeypatch.setenv({"CI": "CI", "notebook": "JPY_PARENT_PID"}[case], "1")
    if case == "installed":
        (tmp_path / ".zfunc").mkdir()
        (tmp_path / ".zfunc/_openenv-pipe").touch()
    if case == "read-only":
        (tmp_path / "cache").touch()
    errors = Terminal()
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setattr("sys.stdout", io.StringIO() if case == "pipe" else Terminal())
    offer_completion()
    offer_completion()
    assert errors.getvalue().count("--install-completion") == (case == "terminal")


def test_completion_offers_groups_with_choices_and_keys():
    assert {"conf=echo", "conf=smoke", "conf=wordle"} <= set(complete_override("conf="))
    assert "model=tiny" in complete_override("mo")
    assert {"seed=", "device=auto"} <= set(complete_override(""))
    assert "trainer.loss.type=gspo" in complete_override("trainer.loss.t")
    assert "trainer.steps=" in complete_override("trainer.s")
    assert complete_override("device=") == ["device=auto", "device=cpu", "device=cuda"]
    assert complete_override("nothing.like=") == []
    assert "trainer.optimizer.lr=" in complete_override("trainer.opt")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--resume", "ru"], ["runs/echo/0001"]),
        (["reproduce", "ru"], ["runs/echo/0001"]),
        (["train", "conf", "=", "wordle_q"], ["wordle_qwen3"]),  # bash breaks words at `=`
        (["train", "conf=wordle_q"], ["conf=wordle_qwen3"]),
    ],
)
def test_completion_in_bash(openenv_pipe, tmp_path, words, expected):
    (tmp_path / "runs/echo/0001").mkdir(parents=True)
    (tmp_path / "runs/echo/0001/run.json").touch()
    result = openenv_pipe(
        _OPENENV_PIPE_COMPLETE="complete_bash",
        COMP_WORDS="\n".join(["openenv-pipe", *words]),
        COMP_CWORD=str(len(words)),
    )
    assert result.stdout.split() == expected


# --- names in the YAML that lead to Python objects -----------------------------------------------


def test_callables_load_from_envs_and_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_terms_of_this_test.py").write_text("class Own:\n    def term(self): ...\n")
    assert resources.load_callable("wordle.policies:consistent").__name__ == "consistent"
    assert resources.load_callable("my_terms_of_this_test:Own.term").__name__ == "term"


@pytest.mark.parametrize(
    ("dotted", "expected"),
    [
        ("no_such_module:name", "no module 'no_such_module'"),
        ("wordle.nothing:name", "no module 'wordle.nothing'"),
        ("sort_of_this_test.policies:expert", "did you mean mine.sort_of_this_test.policies?"),
        ("needi_of_this_test:name", "did you mean needy_of_this_test"),
        ("wordle.policies:consistnt", "did you mean consistent"),
        ("wordle.rules:LENGTH", "has the type int"),
        ("broken_of_this_test:name", "raised ZeroDivisionError"),
        ("needy_of_this_test:name", "needs 'no_such_package'"),
    ],
)
def test_a_callable_that_is_not_there_is_explained(tmp_path, monkeypatch, dotted, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "broken_of_this_test.py").write_text("1 / 0\n")
    (tmp_path / "mine/sort_of_this_test").mkdir(parents=True)
    (tmp_path / "mine/sort_of_this_test/policies.py").touch()
    (tmp_path / "needy_of_this_test.py").write_text("import no_such_package\n")
    with pytest.raises(ConfigError) as caught:
        resources.load_callable(dotted)
    assert expected in str(caught.value)


def test_environments_are_found_by_name_or_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resources.find_env("wordle") == resources.shipped_dir("envs") / "wordle"
    (tmp_path / "envs/wordle").mkdir(parents=True)
    assert resources.find_env("wordle") == tmp_path / "envs/wordle"
    assert resources.find_env("./envs/wordle") == tmp_path / "envs/wordle"
    for name, expected in (("wordel", "did you mean wordle"), ("./nowhere", "is not a folder")):
        with pytest.raises(ConfigError, match=expected):
            resources.find_env(name)


def _log_lines(capsys, verbosity, form):
    configure_logging(verbosity, form)
    logger = logging.getLogger("openenv_pipe.runs.checkpoints")
    logger.debug("a detail")
    logger.info("saved %s", "it")
    logger.warning("damaged")
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("verbosity", "num_lines"), [(0, 1), (1, 2), (2, 3), (5, 3)])
def test_the_log_goes_to_stderr_and_v_shows_more_of_it(capsys, package_log, verbosity, num_lines):
    lines = _log_lines(capsys, verbosity, "text")
    assert len(lines) == num_lines
    assert lines[-1].endswith("damaged")
    assert ("openenv_pipe.runs.checkpoints" in lines[-1]) == (verbosity > 0)
    # the second call adds no second handler
    assert len(_log_lines(capsys, verbosity, "text")) == num_lines


def test_the_log_as_json_has_one_object_a_line(capsys, package_log):
    info, warning = map(json.loads, _log_lines(capsys, 1, "json"))
    assert (info["level"], info["message"]) == ("info", "saved it")
    assert (warning["level"], warning["logger"]) == ("warning", "openenv_pipe.runs.checkpoints")


@pytest.fixture
def package_log():
    """The package's logger; its state is restored after the test."""
    logger = logging.getLogger("openenv_pipe")
    handlers, level = logger.handlers, logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)
