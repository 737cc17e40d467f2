"""A hook of MkDocs: writes the reference of keys, commands and modules while it builds.

The pages follow from the schema (openenv_pipe/config/schema), the shipped YAML (conf/), the
command line's own help and the modules' docstrings, so they cannot differ from the program. Nothing
of them is committed.
"""

import ast
import re
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
import typer.cli
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

from openenv_pipe.cli.main import app
from openenv_pipe.config.rules import all_rules
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.schema_keys import expectation, field_type, members_of
from openenv_pipe.extras.sweeps.schema import SweepSettings

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
# Pages that lie outside docs/, because people look for them there.
OUTSIDE_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
}
LONGEST_VALUE = 60  # characters of a shipped value; a longer one is in the YAML file
# Where the shipped files of a nested block lie, if not in the folder of its own name.
GROUP_OF_KEY = {"env.tasks.train": "env/tasks", "env.tasks.eval": "env/tasks"}

Shipped = dict[str, dict[str, Any]]  # by file name, the values of each shipped file


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    pages = {
        "reference/commands.md": _commands(),
        "reference/config/index.md": _overview(),
        "reference/modules.md": _modules(),
    }
    blocks = {**_top_level_blocks(), "sweep": field_type(SweepSettings.model_fields["sweep"])}
    for key, annotation in blocks.items():
        pages[f"reference/config/{key}.md"] = _block_page(key, annotation)
    pages["reference/config/rules.md"] = _rules()
    for source, target in OUTSIDE_PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        for other, page in OUTSIDE_PAGES.items():
            text = text.replace(f"]({other})", f"]({page})")
        pages[target] = text
    pages["llms.txt"] = _page_list(config, pages)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def _page_list(config: MkDocsConfig, pages: dict[str, str]) -> str:
    """Return llms.txt: the pages of the navigation by section, for programs that read the site."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in config.nav or []:
        for title, entries in section.items():
            named = _named_pages(entries) if isinstance(entries, list) else [(title, entries)]
            lines += ["", f"## {title}", ""]
            for name, path in named:
                text = pages.get(path) or (ROOT / "docs" / path).read_text()
                lines.append(f"- [{name}]({path.removesuffix('.md')}.html): {_opening(text)}")
    return "\n".join(lines) + "\n"


def _opening(page: str) -> str:
    """Return the first sentence of a page's first paragraph of prose, or its heading."""
    blocks = re.sub(r"```.*?```", "", page, flags=re.DOTALL).split("\n\n")
    prose = [block for block in blocks if re.match(r"[\w`*\[]", block.strip())]
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join((prose or blocks)[0].split()))
    return re.split(r"(?<=[.:]) ", text.lstrip("# ").replace("**", ""))[0].rstrip(":")


def _named_pages(entries: list[Any]) -> list[tuple[str, str]]:
    """Return the title and the path of each page; a page without a title has that of its path."""
    found: list[tuple[str, str]] = []
    for entry in entries:
        for name, value in entry.items() if isinstance(entry, dict) else [("Overview", entry)]:
            found += _named_pages(value) if isinstance(value, list) else [(name, value)]
    return found


def _modules() -> str:
    """Return a table for each folder of the package, with the first sentence of each module."""
    package = ROOT / "openenv_pipe"
    lines = ["# Every module", "", "The first sentence of each module's docstring."]
    for folder in [package, *sorted(path for path in package.rglob("*") if path.is_dir())]:
        modules = sorted(folder.glob("*.py"))
        docstrings = [ast.get_docstring(ast.parse(path.read_text())) for path in modules]
        rows = [
            f"| `{path.name}` | {_first_sentence(text)} |"
            for path, text in zip(modules, docstrings, strict=True)
            if text
        ]
        if rows:
            name = folder.relative_to(ROOT).as_posix()
            lines += ["", f"## `{name}/`", "", "| module | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _first_sentence(docstring: str) -> str:
    text = " ".join(docstring.split("\n\n")[0].split())
    return text.replace("|", "\\|").replace("{", "&#123;")


def _top_level_blocks() -> dict[str, Any]:
    fields = RunConfig.model_fields.items()
    return {name: field_type(field) for name, field in fields if _models(field_type(field))}


def _overview() -> str:
    fields = RunConfig.model_fields.items()
    rows = [
        f"| [`{key}`]({key}.md) | {_first_line(model)} |"
        for key, annotation in _top_level_blocks().items()
        for model in [_models(annotation)[0]]
        if len(_models(annotation)) == 1
    ]
    rows += [
        f"| [`{key}`]({key}.md) | one of {_types(annotation)} |"
        for key, annotation in _top_level_blocks().items()
        if len(_models(annotation)) > 1
    ]
    shipped = {"config": yaml.safe_load((CONF / "config.yaml").read_text())}
    own = {name: field for name, field in fields if not _models(field_type(field))}
    return "\n".join(
        [
            "# Every configuration key",
            "",
            "A run's configuration has these blocks, each on a page of its own. A key is set in a",
            "YAML file of `conf/`, or on the command line: `openenv-pipe train conf=wordle",
            "trainer.optimizer.lr=1e-4`. `openenv-pipe show conf=wordle` prints all values of a",
            "run and the file that each block comes from. A key that is not listed is rejected.",
            "",
            "| block | what it sets |",
            "|---|---|",
            *sorted(rows),
            "| [`sweep`](sweep.md) | which runs `train -m` makes; no part of any single run |",
            "",
            "## Keys beside the blocks",
            "",
            *_table("", own, shipped),
        ]
    )


def _rules() -> str:
    lines = [
        "# Settings that do not go together",
        "",
        "Each of these rules is about keys that are valid one by one. The error begins with the",
        "keys and their values, and ends with what is here on the right. A block stands for its",
        "type, `*` for the names of a mapping, and a key in braces for its value. Rules of",
        "`always` hold for every configuration, those of `train` before a training, of `play`",
        "before episodes are played, and of `eval` before an evaluation. `openenv-pipe check`",
        "checks all but the last.",
        "",
    ]
    for block in sorted({rule.block for rule in all_rules()}):
        lines += [f"## `{block}`", "", "| keys | when | why, and what to set |", "|---|---|---|"]
        for rule in all_rules():
            if rule.block == block:
                keys = ", ".join(f"`{key}`" for key in rule.keys)
                lines.append(f"| {keys} | {rule.when} | {_escaped(rule.advice)} |")
        lines.append("")
    return "\n".join(lines)


def _block_page(key: str, annotation: Any) -> str:
    lines = [f"# `{key}`", ""]
    models = _models(annotation)
    if any(get_origin(each) is dict for each in members_of(annotation)):
        key = f"{key}.NAME"
    if len(models) > 1:
        lines += [f"`{key}.type` chooses between {_types(annotation)}.", ""]
    for model in models:
        lines += _sections(key, model, has_types=len(models) > 1, level=2)
    return "\n".join(lines)


def _sections(key: str, model: type[BaseModel], *, has_types: bool, level: int) -> list[str]:
    """A heading, the docstring and the table of one block; then the same of the blocks in it."""
    tag = _tag(model)
    title = f"`{key}` with `type: {tag}`" if has_types and tag else f"`{key}`"
    lines = [f"{'#' * level} {title}", "", " ".join((model.__doc__ or "").split()), ""]
    shipped = _shipped_values(key, tag if has_types else None)
    lines += _table(key, model.model_fields, shipped)
    for name, field in model.model_fields.items():
        inner = _models(field_type(field))
        if get_origin(field.annotation) is dict or not inner:
            inner = _models(get_args(field.annotation)[-1]) if inner else []
            name = f"{name}.NAME"
        for each in inner:
            path = f"{key}.{name}"
            lines += _sections(path, each, has_types=len(inner) > 1, level=min(level + 1, 4))
    return lines


def _table(key: str, fields: dict[str, Any], shipped: Shipped) -> list[str]:
    prefix = f"{key}." if key else ""
    lines = ["| key | value | shipped | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        if name == "type" and len(get_args(field.annotation)) == 1:
            continue  # the heading says it
        annotated = field.annotation
        if field.metadata:
            annotated = Annotated[(annotated, *field.metadata)]
        value = "a block, see below" if _models(field_type(field)) else expectation(annotated)
        meaning = field.description or ""
        cells = (f"`{prefix}{name}`", value, _shipped_text(name, shipped), meaning)
        lines.append(f"| {' | '.join(_escaped(cell) for cell in cells)} |")
    return [*lines, ""]


def _shipped_text(name: str, shipped: Shipped) -> str:
    """The value that most files give, then the files that give another."""
    values = {file: content[name] for file, content in shipped.items() if name in content}
    texts = {file: _value_text(value) for file, value in values.items()}
    if not texts:
        return ""
    common = next(iter(texts.values()))
    others = [f"`{file}`: {text}" for file, text in texts.items() if text != common]
    return "; ".join([common, *others])


def _value_text(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "below"
    if value == "???":
        return "none, has to be set"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    text = " ".join(text.split())
    return f"`{text}`" if len(text) <= LONGEST_VALUE else "in the YAML file"


def _shipped_values(key: str, tag: str | None) -> Shipped:
    """What the files of the block's group in conf/ say, those of the block's type only."""
    top, *rest = key.split(".")
    folder = CONF / GROUP_OF_KEY.get(key, key.replace(".", "/"))
    if folder.is_dir() and key != "env":
        found = {path.stem: _read(path) for path in sorted(folder.glob("*.yaml"))}
        rest = []
    else:
        paths = [CONF / "env/base.yaml"] if top == "env" else sorted((CONF / top).glob("*.yaml"))
        found = {path.stem: _read(path) for path in paths}
    for part in rest:
        if top == "tracker":  # each file of this group has one entry, named after the file
            found = {file: each[file] for file, each in found.items() if file in each}
            continue
        found = {
            file: each[part] for file, each in found.items() if isinstance(each.get(part), dict)
        }
    if tag is not None:
        found = {file: each for file, each in found.items() if each.get("type") == tag}
    # The file that others build on first, then the rest.
    first = [name for name in (tag, "base", "default", "grpo", "hub", "range") if name in found]
    return {name: found[name] for name in dict.fromkeys([*first, *found])}


def _read(path: Path) -> dict[str, Any]:
    """A YAML file on top of the files of its folder that its defaults list names."""
    own = yaml.safe_load(path.read_text()) or {}
    values: dict[str, Any] = {}
    for entry in own.pop("defaults", ["_self_"]):
        if entry == "_self_":
            _merge(values, own)
        elif isinstance(entry, str) and (path.parent / f"{entry}.yaml").exists():
            _merge(values, _read(path.parent / f"{entry}.yaml"))
    return values


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The blocks that a key may hold, in a union, a list or a mapping too."""
    found: list[type[BaseModel]] = []
    for member in members_of(annotation):
        if get_origin(member) is not None:
            found += [model for argument in get_args(member) for model in _models(argument)]
        elif isinstance(member, type) and issubclass(member, BaseModel):
            found.append(member)
    return list(dict.fromkeys(found))


def _tag(model: type[BaseModel]) -> str | None:
    """The value of `type` that chooses the block."""
    field = model.model_fields.get("type")
    values = get_args(field.annotation) if field else ()
    return values[0] if len(values) == 1 else None


def _types(annotation: Any) -> str:
    return ", ".join(f"`{_tag(model)}`" for model in _models(annotation))


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().split("\n")[0]


def _escaped(text: str) -> str:
    """The text of a table's cell, with what Markdown would read as a link or a tag spelt out."""
    parts = text.replace("|", "\\|").replace("\n", " ").split("`")
    parts[::2] = [each.replace("[", "&#91;").replace("<", "&lt;") for each in parts[::2]]
    return "`".join(parts)


def _commands() -> str:
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="openenv-pipe")
    for group in (command, *getattr(command, "commands", {}).values()):
        commands = getattr(group, "commands", {})
        for name in [name for name, each in commands.items() if each.hidden]:
            del commands[name]
    text = typer.cli.get_docs_for_click(obj=command, ctx=context, name="openenv-pipe")
    lines = text.replace("# `openenv-pipe`", "# Commands", 1).splitlines()
    # Examples stand in the help one a line; as code they keep their lines.
    is_example = [line.startswith("openenv-pipe ") for line in lines]
    return "\n".join(
        f"    {line}" if example else line for line, example in zip(lines, is_example, strict=True)
    )
