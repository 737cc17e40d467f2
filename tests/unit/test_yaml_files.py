"""YAML files that Hydra cannot read: each is rejected at once, with its name and what to do."""

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError

HEADER = "# @package _global_\n"
BASE = HEADER + "name: mine\n"
RESET = BASE + "env: {tasks: {train: {reset: %s}}}\n"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where an experiment `mine` of one's own is written."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "conf/conf/mine.yaml"
    path.parent.mkdir(parents=True)
    return path


REJECTED = {
    "its own defaults": (HEADER + "defaults: [mine, _self_]\n", "conf/mine.yaml; remove one entry"),
    "a cyclic mapping": (BASE + "env: &a {variables: *a}\n", "*a is inside what it repeats"),
    "a cyclic list": (RESET % "&a [*a]", "*a is inside what it repeats"),
    "deep lists": (RESET % ("[" * 300 + "]" * 300), "nested more than 64 levels"),
    "very deep lists": (RESET % ("[" * 9000 + "]" * 9000), "nested more than 64 levels"),
    "deep mappings": (RESET % ("{a: " * 80 + "1" + "}" * 80), "nested more than 64 levels"),
    "no package": ("name: mine\n", "has to begin with `# @package _global_`"),
    "another package": ("# @package _group_\nname: mine\n", "has to begin with"),
    "a package too late": ("name: mine\n" + HEADER, "has to begin with"),
    "half a package": ("# @package\nname: mine\n", "has to begin with"),
    "a byte order mark": ("\ufeff" + BASE, "byte order mark (UTF-8); save it as UTF-8 without"),
    "a list": (HEADER + "- name: mine\n", "expected keys and values"),
    "text": (HEADER + "mine\n", "expected keys and values"),
    "odd defaults": (HEADER + "defaults: [3]\n", "Unsupported type in defaults"),
    "two documents": (BASE + "---\n" + BASE, "but found another document"),
    "a null character": (BASE + "runs_dir: a\0b\n", "special characters are not allowed"),
    "a key of null": (RESET % "{null: 1}", "Incompatible key type"),
    "a set": (RESET % "{a: !!set {x, y}}", "not a supported primitive type"),
    "a Python object": (RESET % "!!python/object/apply:os.getcwd []", "constructor for the tag"),
    "deep interpolations": (BASE + f"runs_dir: '{'${' * 500}seed{'}' * 500}'\n", "nested too deep"),
    "an escape in a key": (BASE + '"\\e[31m": 1\n', r"\x1b[31m: the key: text with the control"),
    "an escape in a header": ("# @\x1b a b\n" + BASE, r"Too many components in '@\u001b a b'"),
    "many unknown keys": (BASE + "".join(f"key_{i}: 1\n" for i in range(300)), "and 280 more"),
    "a long key": (BASE + f"? {'k' * 9000}\n: 1\n", "kkk...=1: no such key"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_file_that_cannot_be_read_is_rejected(path, case):
    text, says = REJECTED[case]
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(["conf=mine"])
    message = str(caught.value)
    assert says in message
    assert len(message) < 2000
    assert message.replace("\n", " ").isprintable()


def test_other_encodings_are_named(path):
    for encoding, says in (("utf-16", "(UTF-16)"), ("latin-1", "line 3: not UTF-8")):
        path.write_bytes((BASE + "runs_dir: Läufe\n").encode(encoding))
        with pytest.raises(ConfigError) as caught:
            compose(["conf=mine"])
        assert f"{path}" in str(caught.value)
        assert says in str(caught.value)


def test_a_comment_may_come_before_the_package(path):
    path.write_text("# conf/conf/mine.yaml\n" + BASE)
    assert compose(["conf=mine"]).config.name == "mine"


@pytest.mark.parametrize(
    "override",
    [
        f"+env.tasks.train.reset.a={'[' * 300}{']' * 300}",
        f"+env.tasks.train.reset.a={'[' * 2000}{']' * 2000}",
        f"+env.{'.'.join('a' * 300)}=1",
        f"seed={'1' * 5000}",
        f"conf={'a' * 5000}",
        "env=[[]]",
        "runs_dir=a\0b",
        "runs_dir='\x1b[31m'",
        "seed=int(a)",
    ],
    ids=lambda override: repr(override[:30]),
)
def test_an_override_that_cannot_be_read_is_rejected(override):
    with pytest.raises(ConfigError) as caught:
        compose(["conf=echo", override])
    message = str(caught.value)
    assert len(message) < 2000
    assert message.replace("\n", " ").isprintable()
