"""The lines of a check as a JUnit XML file, which CI systems show as test results."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.errors import UserError
from openenv_pipe.system.files import write_bytes
from openenv_pipe.system.untrusted_text import for_people


def write_junit(path: Path, lines: Sequence[Line]) -> None:
    """Write a test case for each line, in a suite with the file's name. A warning is no failure.

    Raises UserError if the file cannot be written.
    """
    failures = sum(line.result is Result.FAIL for line in lines)
    counts = {"tests": str(len(lines)), "failures": str(failures), "errors": "0", "skipped": "0"}
    root = Element("testsuites", counts)
    suite = SubElement(root, "testsuite", {"name": for_people(path.stem), **counts})
    for line in lines:
        name, text = for_people(line.name), for_people(line.text)
        case = SubElement(suite, "testcase", classname=suite.attrib["name"], name=name)
        if line.result is Result.FAIL:
            SubElement(case, "failure", message=text).text = text
        else:
            SubElement(case, "system-out").text = f"{line.result}: {text}"
    indent(root)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")
    except OSError as error:
        raise UserError(f"--junit {path} cannot be written: {error}") from error
