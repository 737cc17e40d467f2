"""`check --junit`: the file says what the exit code says."""

from xml.etree.ElementTree import parse

import pytest

from tests.commands import run


@pytest.mark.parametrize(("override", "code"), [("seed=0", 0), ("env.package=wordel", 1)])
def test_the_file_has_a_failure_if_the_check_has_failed(tmp_path, override, code):
    command = ("check", "conf=smoke", "host.sessions_per_server=4", "device=cpu", override)
    path = tmp_path / "results/check.xml"
    ended, _, err = run(tmp_path, *command, "--junit", "results/check.xml")
    assert ended == code, err
    assert len(parse(path).findall(".//failure")) == code
    durations_s = [float(case.attrib["time"]) for case in parse(path).findall(".//testcase")]
    assert max(durations_s) > 0
    ended, _, err = run(tmp_path, *command, "--junit", "results/check.xml")
    assert ended == 2 and "exists and is not overwritten" in err


def test_an_error_before_there_are_results_is_listed_too(tmp_path):
    ended, _, err = run(tmp_path, "check", "conf=nothing", "--junit", "check.xml")
    (case,) = parse(tmp_path / "check.xml").findall(".//testcase")
    assert case.attrib == {"classname": "check conf=nothing", "name": "check conf=nothing"}
    (failure,) = case
    assert ended == 2 and failure.text in err and "there is no such experiment" in failure.text
    ended, _, err = run(tmp_path, "check", "conf=smoke", "--junit", ".")
    assert ended == 2 and "is a folder; name a file" in err
