"""Text of others cannot act on a terminal, on Markdown or on HTML, and is cut where it is long."""

import io
import json

import pytest
from rich.table import Table

from openenv_pipe.cli.console import open_console
from openenv_pipe.cli.progress import LiveProgress, notify_user
from openenv_pipe.errors import FailureError
from openenv_pipe.system.markdown import table
from openenv_pipe.system.untrusted_text import (
    MAX_LENGTH,
    code_block,
    code_span,
    for_markdown,
    for_people,
    quoted,
    shortened,
    visible,
)

# Control sequences, a title, a link, bells, backspaces, C1, bidirectional overrides, tags,
# zero-width characters, line separators, and halves of surrogate pairs.
ACTING = (
    *(
        "\x1b[2J",
        "\x1b]0;title\x07",
        "\x1b]8;;http://x\x1b\\",
        "\0",
        "\b\b",
        "\r",
        "\x7f",
        "\x9b2J",
    ),
    *("\u202e", "\u2066", "\u200f", "\u200b", "\ufeff", "\u2028", "\x85", "\x0b", "\x0c"),
    *("\ud800", "\udfff", "\U000e0041", "\u061c", "\u00ad"),
)


def acts(text):
    """Whether a text has a character that is not seen; line feeds and tabs are layout."""
    return any(not char.isprintable() and char not in "\n\t" for char in text)


@pytest.mark.parametrize("bad", ACTING)
def test_nothing_acts_on_a_terminal(bad):
    text = f"a{bad}b"
    assert acts(text)
    for shown in (
        visible(text),
        for_people(text),
        for_markdown(text),
        quoted(text),
    ):
        assert not acts(shown)
    assert (
        not acts(code_block(text)) and not acts(code_span(text)) and not acts(table(["", text], []))
    )
    stream = io.StringIO()
    notify_user(text, stream)
    progress = LiveProgress(stream)
    progress.note(text)
    progress.close()
    open_console(file=stream, width=80).print(text, Table("title", text), style="red")
    assert not acts(stream.getvalue())


def test_json_stays_json():
    values = list(ACTING)
    assert json.loads(visible(json.dumps(values, ensure_ascii=False))) == values


def test_other_scripts_and_emoji_stay():
    text = "\u00fc \u4f60\u597d \u0627\u0644 \U0001f469\u200d\U0001f680 e\u0301\tx\ny"
    assert visible(text) == text


def test_a_console_reads_no_markup_and_keeps_styles():
    stream = io.StringIO()
    console = open_console(file=stream, force_terminal=True, color_system="standard")
    console.print("[red]x[/] [/nothing] :smile:", style="green", highlight=False)
    assert stream.getvalue() == "\x1b[32m[red]x[/] [/nothing] :smile:\x1b[0m\n"


def test_a_secret_that_a_cut_would_halve_is_hidden(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789")
    assert "tok" not in quoted(b"x" * 75 + b"tok-0123456789")
    assert "tok" not in for_people("x" * (MAX_LENGTH - 5) + "tok-0123456789")


def test_what_is_long_is_cut_and_says_where_all_of_it_is(tmp_path):
    text = shortened("x" * (MAX_LENGTH + 1234), whole=tmp_path / "error.txt")
    assert (
        text
        == "x" * MAX_LENGTH + f"... (1,234 more characters; whole text in {tmp_path}/error.txt)"
    )
    assert shortened("x" * MAX_LENGTH) == "x" * MAX_LENGTH
    assert len(for_people("\x1b[31m" * 10**6)) < 3 * MAX_LENGTH


def test_the_end_of_a_huge_log_is_short(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 10**7 + b"\nlast")
    assert len(str(FailureError("died", log))) < 500 + len(str(log))
    assert str(FailureError("died", log)).endswith("\n  | last")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)>"),
        ("# heading", r"\# heading"),
        ("line\n\n# heading", "line # heading"),
        ("![x](http://y)", r"![x\](http://y)"),
        ("[x]: http://y", r"[x\]: http://y"),
        ("**bold** _it_ a_b", r"\*\*bold\*\* \_it\_ a_b"),
        ("`code` \\` x", r"\`code\` \\\` x"),
        ("&lt;b&#62; & c", "&amp;lt;b&amp;#62; & c"),
        ("1. x", r"1\. x"),
        ("> x", "&gt; x"),
        ("---", r"\---"),
        ("0.94 [0.74, 1.05] -> ok", "0.94 [0.74, 1.05] -> ok"),
    ],
)
def test_markdown_shows_a_text_as_it_is_written(text, shown):
    assert for_markdown(text) == shown


@pytest.mark.parametrize("text", ["```\n# x", "~~~\n````\n<b>", "`", "``a`"])
def test_a_text_cannot_leave_its_code(text):
    fence = code_block(text).split("text\n")[0]
    assert len(fence) >= 3 and fence not in text and code_block(text).endswith(f"\n{fence}")
    ticks = code_span(text).partition(text[0])[0].strip() or code_span(text).split(" ")[0]
    assert ticks not in text


def test_a_cell_of_a_table_cannot_open_another():
    assert table(["a"], [["x | y\n| z"]]).splitlines()[2] == r"| x \| y \| z |"
