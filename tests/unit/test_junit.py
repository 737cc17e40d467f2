"""`--junit`: the lines of a check as XML."""

from xml.etree.ElementTree import parse

import pytest
import typer

from openenv_pipe.cli import main as cli
from openenv_pipe.cli.arguments import junit_files, reject_existing
from openenv_pipe.commands.findings import Line, Result, write_junit
from openenv_pipe.errors import UserError


def test_only_failed_lines_are_failures(tmp_path):
    path = tmp_path / "reports/check.xml"
    write_junit(
        path,
        "env check wordle",
        [
            Line("seeds", Result.OK, "the same seed, the same task", duration_s=61.5),
            Line("speed", Result.WARN, "slow"),
            Line("rewards", Result.FAIL, "all <equal> & constant"),
        ],
    )
    (suite,) = parse(path).getroot()
    assert (suite.attrib["name"], suite.attrib["tests"], suite.attrib["failures"]) == (
        *("env check wordle", "3", "1"),
    )
    cases = {case.attrib["name"]: case[0] for case in suite}
    assert {name: found.tag for name, found in cases.items()} == {
        "seeds": "system-out",
        "speed": "system-out",
        "rewards": "failure",
    }
    assert [case.attrib.get("time") for case in suite] == ["61.500", None, None]
    assert cases["speed"].text == "warn: slow"
    assert cases["rewards"].text == cases["rewards"].attrib["message"] == "all <equal> & constant"


def test_characters_that_xml_forbids_are_written_out(tmp_path):
    path = tmp_path / "check.xml"
    forbidden = [*map(chr, (0, 8, 11, 12, 14, 31, 0xD800, 0xDFFF, 0xFFFE, 0xFFFF))]
    write_junit(path, "check", [Line("".join(forbidden), Result.FAIL, "a\n" + "".join(forbidden))])
    ((case,),) = parse(path).getroot()
    assert case[0].attrib["message"] == "a"
    assert case[0].text == (r"a" "\n" r"\u0000\b\u000b\f\u000e\u001f\ud800\udfff\ufffe\uffff")
    assert case.attrib["name"] == case[0].text[2:]


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "mine.xml"
    path.write_text("mine")
    context = typer.Context(typer.core.TyperCommand("check"))
    with pytest.raises(UserError, match=r"--junit .*mine\.xml exists and is not overwritten"):
        reject_existing(context, path)
    with pytest.raises(UserError, match=r"--junit .*cannot be written"):
        write_junit(path / "check.xml", "check", [])
    assert reject_existing(context, tmp_path / "new.xml") == tmp_path / "new.xml"


def test_an_error_of_another_command_is_not_written(tmp_path, monkeypatch):
    """One process may run several commands, and a command that was only read may name a file."""
    monkeypatch.chdir(tmp_path)
    junit_files.clear()  # of the tests before
    check = typer.main.get_command(cli.app).commands["check"]
    check.make_context("check", ["conf=echo", "--junit", "check.xml"])
    with pytest.raises(SystemExit):
        cli.main(["show", "conf=echo", "no_such_key=1"])
    assert list(tmp_path.iterdir()) == []
