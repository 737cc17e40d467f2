"""Find a YAML file of `conf/`, check it before Hydra reads it, and find the line of a key.

Hydra and OmegaConf follow values by recursion, so values nested too deep would end in a
RecursionError that names no file.
"""

import codecs
from pathlib import Path

import yaml

from openenv_pipe.config.schema.plain_data import MAX_DEPTH
from openenv_pipe.errors import ConfigError
from openenv_pipe.system import resources

MAX_SIZE_MB = 8
EXPERIMENTS = "conf"  # the group whose files set keys of all blocks
GLOBAL = "# @package _global_"
MARKS = {codecs.BOM_UTF8: "UTF-8", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
EMPTY = ("", "~", "null")  # how YAML writes that there is nothing
Origins = dict[str, Path | str]  # by dotted key: the file or the override that sets it
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def find_file(name: str) -> Path | None:
    """Return the first file of this name, such as `env/wordle`, on the search path."""
    name = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    paths = (folder / name for folder in resources.conf_dirs())
    return next((path for path in paths if path.is_file()), None)


def check_file(path: Path, *, is_experiment: bool) -> str:
    """Return a file's text, after a check of its size, encoding, kind and nesting.

    Text that is not YAML at all is left to the reader, which names the line.

    Raises ConfigError: the file cannot be used; the message names it.
    """
    text = _read(path)
    try:
        is_mapping = _is_mapping(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        # libyaml looks ahead, and from PyYAML 6.0.4 on gives up by itself at a thousand levels.
        if "nesting depth" in str(error):
            raise ConfigError(f"{path}: values are nested more than {MAX_DEPTH} levels") from None
        return text
    if not is_mapping:
        raise ConfigError(f"{path}: expected keys and values, such as `name: wordle`")
    if is_experiment and not _is_global(text):
        raise ConfigError(
            f"{path}: an experiment sets keys of all blocks, so it has to begin with "
            f"`{GLOBAL}`; without it, its keys would be those of a block named {EXPERIMENTS}"
        )
    return text


def find_line(path: Path, key: str) -> int | None:
    """Return the line on which a file sets a dotted key; None if it cannot be found.

    The key may begin with the file's own block, which the file does not repeat.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    names = key.split(".")
    for start in range(len(names)):
        node, line = root, None
        for name in names[start:]:
            entries = node.value if isinstance(node, yaml.MappingNode) else []
            found = next((each for each in entries if each[0].value == name), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        else:
            return line
    return None


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= MAX_SIZE_MB * 2**20 else b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if size > MAX_SIZE_MB * 2**20:
        raise ConfigError(
            f"{path} has {size / 2**20:.0f} MB; expected at most {MAX_SIZE_MB}; put large data "
            "into a file that the environment or env.tasks reads"
        )
    for mark, encoding in MARKS.items():
        if content.startswith(mark):
            raise ConfigError(
                f"{path} begins with a byte order mark ({encoding}); save it as UTF-8 without one"
            )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from None


def _is_global(text: str) -> bool:
    """Whether one of the comments at the top is the header."""
    for line in filter(str.strip, text.splitlines()):
        if not line.lstrip().startswith("#"):
            return False
        if line.split() == GLOBAL.split():
            return True
    return False


def _is_mapping(text: str) -> bool:
    """Whether a document holds keys and values, or nothing.

    Raises:
        ValueError: it is nested too deep, or a value contains itself.
        YAMLError: it is not YAML.
    """
    root = None
    open_anchors: list[str | None] = []  # of the collections that are still open
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.NodeEvent) and root is None:
            root = event
        match event:
            case yaml.CollectionStartEvent():
                open_anchors.append(event.anchor)
            case yaml.CollectionEndEvent():
                open_anchors.pop()
            case yaml.AliasEvent() if event.anchor in open_anchors:
                raise ValueError(f"*{event.anchor} is inside what it repeats")
        if len(open_anchors) > MAX_DEPTH:
            raise ValueError(f"values are nested more than {MAX_DEPTH} levels deep")
    is_empty = isinstance(root, yaml.ScalarEvent) and root.value in EMPTY
    return root is None or is_empty or isinstance(root, yaml.MappingStartEvent)
