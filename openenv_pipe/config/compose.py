"""Compose YAML groups and overrides into one validated RunConfig."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from openenv_pipe.config.beside import BESIDE_BLOCKS, beside_origins, forget_replaced, merge
from openenv_pipe.config.composed_files import ComposedFiles, find_origins, open_loader
from openenv_pipe.config.error_messages import (
    MAX_KEY_LENGTH,
    explain_choice,
    explain_composition,
    explain_missing,
    explain_override,
    explain_recursion,
    explain_validation,
    explain_yaml,
)
from openenv_pipe.config.resolvers import default_correction, default_max_mismatch
from openenv_pipe.config.schema import RunConfig, ServingConfig
from openenv_pipe.config.schema.base import Block
from openenv_pipe.config.schema.plain_data import reject_unusual_values
from openenv_pipe.config.secrets import shown_override
from openenv_pipe.config.yaml_files import EXPERIMENTS, Origins
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.resources import did_you_mean
from openenv_pipe.system.untrusted_text import visible

if TYPE_CHECKING:  # Importing Hydra takes longer than all other imports here.
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.types import Override

NO_EXPERIMENT = "conf=_none"  # composes the groups alone

TERMS = ["reward", "terms"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    config: RunConfig
    origins: Mapping[str, Path | str]  # by dotted key: the file or the override that sets it
    overrides: tuple[str, ...]  # as given


def compose(overrides: Sequence[str]) -> Composed:
    """Compose and validate the configuration that the overrides ask for.

    Raises ConfigError: An override, a YAML file or a value is wrong.
    """
    origins: Origins = {}
    with readable_errors(origins=origins):
        loader = open_loader()
        parsed = _parse(overrides)
        files = ComposedFiles(loader, [_as_assignment(loader, override) for override in parsed])
        # The origins come first, because composing modifies what was read.
        set_keys = [o for o in parsed if not o.is_delete() and not _is_group(loader, o)]
        origins |= find_origins(files, set_keys)
        config = RunConfig.model_validate(_values(files, origins=origins))
        return Composed(config=config, origins=origins, overrides=tuple(overrides))


def compose_env(overrides: Sequence[str]) -> ServingConfig:
    """Compose only the blocks `env` and `host`, without an experiment.

    Unless a model is chosen, prompts are those for models that understand language.

    Raises ConfigError: An override, a YAML file or a value is wrong.
    """
    with readable_errors():
        loader = open_loader()
        parsed = _parse(overrides)
        for override in parsed:
            if block_of(override).split("/")[0] not in ("env", "host", "model"):
                raise ConfigError(
                    f"{shown_override(override.input_line)} does not concern an environment; "
                    "expected keys of env and host, or a whole experiment: conf=NAME"
                )
        lines = [_as_assignment(loader, override) for override in parsed]
        if not any(block_of(override) == "model" for override in parsed):
            lines.append("model=hub")
        return ServingConfig.model_validate(
            load_values(loader, [NO_EXPERIMENT, *lines], only=("env", "host"))
        )


def amend(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Change keys or whole blocks of a saved configuration.

    Only groups that are named are read from `conf/`; everything else stays as saved. A correction
    or `trainer.max_mismatch` that equals the saved engine's default becomes the new engine's.

    Raises ConfigError: An override or a value is wrong.
    """
    values = config.model_dump()
    with readable_errors():
        loader = open_loader()
        parsed = _parse(overrides)
        groups = {each.key_or_group for each in parsed if _is_group(loader, each)}
        forget_replaced(values["beside"], [each.key_or_group for each in parsed])
        for override in parsed:
            if override.is_delete() or override.key_or_group == "conf":
                raise ConfigError(
                    f"{shown_override(override.input_line)} cannot be applied to a "
                    "saved run; expected KEY=VALUE or BLOCK=NAME"
                )
            block = block_of(override)
            if "/" in override.key_or_group and block not in groups:
                raise ConfigError(
                    f"{shown_override(override.input_line)} chooses a part of the block {block} of "
                    f"a saved run; choose the whole block with it, as in {block}=NAME "
                    f"{override.key_or_group}=..."
                )
            if override.key_or_group not in groups:
                assign(values, override.key_or_group, override.value())
        _remove_terms(values["reward"], config.reward.terms)
        if groups:
            lines = [
                _as_assignment(loader, each)
                for each in parsed
                if groups & {each.key_or_group, block_of(each)}
            ]
            if "model" not in groups:
                lines.append(f"model={config.model.type}")  # An env's prompts depend on it.
            values |= load_values(loader, [NO_EXPERIMENT, *lines], only=groups, saved=values)
        changed = tuple(each.key_or_group for each in parsed)
        trainer, saved = values["trainer"], config.engine.capabilities
        correction = trainer["loss"]["correction"]
        is_default = correction["type"] == saved.default_correction
        if is_default and not "trainer.loss.correction.type".startswith(changed):
            correction["type"] = default_correction(values["engine"])
        is_default = trainer["max_mismatch"] == saved.default_max_mismatch(config.model.autocast)
        if is_default and not "trainer.max_mismatch".startswith(changed):
            trainer["max_mismatch"] = default_max_mismatch(values["engine"], values["model"])
        return RunConfig.model_validate(_with_experiments(loader, values, {}))


def parse_overrides(
    overrides: Sequence[str], loader: "ConfigLoaderImpl | None" = None
) -> list["Override"]:
    """Parse the lines by Hydra's grammar; globs stand for choices of the loader's groups."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create(config_loader=loader)
    parsed = []
    for line in overrides:
        try:
            (override,) = parser.parse_overrides([line])
            is_valid = bool(override.key_or_group) and len(override.key_or_group) <= MAX_KEY_LENGTH
        # A number may have too many digits, or a value too many brackets.
        except (HydraException, ValueError, RecursionError):
            is_valid = False
        if not is_valid:
            shown = line if len(line) <= MAX_KEY_LENGTH else f"{line[:MAX_KEY_LENGTH]}..."
            raise ConfigError(explain_override(shown))
        if not override.is_sweep_override():
            reject_unusual_values({override.key_or_group: override.value()})
        parsed.append(override)
    return parsed


def _parse(overrides: Sequence[str]) -> list["Override"]:
    """Parse the overrides of one run. Raises ConfigError for those of sweeps and of Hydra."""
    parsed = parse_overrides(overrides)
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(
                f"{shown_override(override.input_line)} gives several values, but a run takes "
                "one; write a list as key=[a,b], and text with a comma as \"key='a,b'\"; "
                "`openenv-pipe train -m` starts a run for each value"
            )
        if override.is_hydra_override():
            raise ConfigError(
                f"{shown_override(override.input_line)}: Hydra's own settings have no effect here; "
                "remove it"
            )
        if block_of(override) == "sweep":
            raise ConfigError(
                f"{shown_override(override.input_line)} is a setting of sweeps; remove it, or "
                "start a sweep with `openenv-pipe train -m`"
            )
    return parsed


def _is_group(loader: "ConfigLoaderImpl", override: "Override") -> bool:
    return loader.repository.group_exists(override.key_or_group)


def block_of(override: "Override") -> str:
    """Return the top-level key that an override changes: `env`, also for the group env/adapter."""
    return override.key_or_group.replace("/", ".").split(".")[0]


def _as_assignment(loader: "ConfigLoaderImpl", override: "Override") -> str:
    """Return the line for Hydra: a key gets `++`, which sets it whether or not it exists.

    So keys of free mappings need no `+`, and the schema reports all unknown keys at once.
    """
    line = override.input_line or ""
    if override.is_delete():
        return line
    if _is_group(loader, override):
        choice = override.value()
        choices = choice if isinstance(choice, list) else [choice]
        if override.key_or_group == EXPERIMENTS and choice is choices:
            raise ConfigError(
                f"{line} names several experiments, but a run has one; to build on an experiment, "
                "write your own in conf/conf/, with `# @package _global_` as its first line and "
                "defaults: [wordle, _self_]"
            )
        is_text = all(isinstance(each, str) for each in choices)
        if not is_text or len(str(choice)) > MAX_KEY_LENGTH:
            raise ConfigError(explain_choice(override.key_or_group, choice))
        return line
    return "++" + line.lstrip("+")


def load_values(
    loader: "ConfigLoaderImpl",
    overrides: list[str],
    only: Collection[str] = (),
    *,
    saved: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the composed values, or only some blocks of them.

    saved: the values of all other blocks, to which interpolations may refer.

    Raises ConfigError: Values that the YAML leaves to the user (`???`) are missing.
    """
    return _values(ComposedFiles(loader, overrides), only, saved)


def _values(
    files: ComposedFiles,
    only: Collection[str] = (),
    saved: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    origins: Origins | None = None,
) -> dict[str, Any]:
    """Return what `load_values` describes.

    change: applied to all values before interpolations are resolved. origins: those of the files,
    if they are known; the origins of keys in `beside` are added to them.
    """
    from omegaconf import OmegaConf, flag_override

    origins = find_origins(files) if origins is None else origins
    tree = files.merged()
    others = set(tree) - set(only) if only else set()
    with flag_override(tree, ["struct", "readonly"], [False, False]):
        for key in others:
            del tree[key]
            if saved and key in saved:
                tree[key] = _literal(saved[key])
    if change is not None:
        unresolved: Any = OmegaConf.to_container(tree, resolve=False)
        tree = OmegaConf.create(change(unresolved))
    if missing := OmegaConf.missing_keys(tree):
        raise ConfigError(explain_missing(sorted(missing)))
    values: Any = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(values, dict)
    kept = {key: value for key, value in values.items() if key not in others}
    keys = [key.split(".") for key in origins]
    _remove_terms(kept.get("reward"), {key[2] for key in keys if key[:2] == TERMS and key[3:]})
    return _with_experiments(files.loader, kept, origins)


def _remove_terms(reward: Any, known: Collection[str]) -> None:
    """Remove the terms that are null. Raises ConfigError for one that is not among the known."""
    terms = reward.get("terms") if isinstance(reward, dict) else None
    if not isinstance(terms, dict):  # The schema rejects it.
        return
    for name in [name for name, term in terms.items() if term is None]:
        # `env: null` in a file removes the default reward, which another reward may not have.
        if name not in known and name != "env":
            raise ConfigError(
                f"reward.terms.{name}=null removes a term, but no term has that name; "
                f"expected one of {', '.join(sorted(known))}{did_you_mean(name, [*known])}"
            )
        del terms[name]


def _with_experiments(
    loader: "ConfigLoaderImpl", values: dict[str, Any], origins: Origins
) -> dict[str, Any]:
    """Return the values with the blocks of each experiment that a `beside.NAME.conf` names.

    Raises ConfigError if a `conf` is missing, or names no experiment.
    """
    beside: Any = values.get("beside")
    for name, given in beside.items() if isinstance(beside, dict) else ():
        if not isinstance(given, dict) or ("conf" not in given and given.keys() >= BESIDE_BLOCKS):
            continue  # The schema rejects what is not a mapping; a saved run has all blocks.
        experiment = given.pop("conf", None)
        if not isinstance(experiment, str):
            key = f"beside.{name}.conf"
            given_as = f"{key} is missing" if experiment is None else f"{key}={experiment!r}"
            raise ConfigError(
                f"{given_as}: expected the name of an experiment, whose environment is trained "
                f"beside the first, such as {key}=echo"
            )
        lines = [f"{EXPERIMENTS}={experiment}", f"model={values['model']['type']}"]
        try:
            files = ComposedFiles(loader, lines)
            origins |= beside_origins(name, find_origins(files)) | origins
            found = _experiment_blocks(files, given, values)
        except ConfigError as error:
            raise ConfigError(f"beside.{name}: {error}") from None
        beside[name] = {"weight": 1.0, "teacher": None, **given, **found}
    return values


def _experiment_blocks(
    files: ComposedFiles, given: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the blocks of an experiment, changed by the keys given in `beside`.

    values: the run's own, for the blocks that are not the experiment's.
    """

    def changed(tree: dict[str, Any]) -> dict[str, Any]:
        kept = {key: tree[key] for key in BESIDE_BLOCKS}
        kept["advantage"] = tree["trainer"]["advantage"]
        merge(kept, _literal(given))
        return {**tree, **kept, "trainer": _literal(values["trainer"])}

    own = {*BESIDE_BLOCKS, "trainer", "advantage"}
    found = _values(files, own, values, changed)
    return {key: found[key] for key in own - {"trainer"}}


def _literal(value: Any) -> Any:
    """Escape a saved value for OmegaConf, so that `${` in a text begins no interpolation."""
    if isinstance(value, Mapping):
        return {key: _literal(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_literal(each) for each in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key!r}: {parent} is a value and has no keys of its own")
    values[last] = value


def _config_error_behind(error: BaseException | None) -> ConfigError | None:
    """Return the ConfigError that Hydra and OmegaConf have wrapped, if there is one."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    return error


@contextmanager
def readable_errors(
    schema: type[Block] = RunConfig, origins: Origins | None = None
) -> Iterator[None]:
    """Turn errors of Hydra, YAML and `schema` into ConfigErrors. origins: of keys, if known."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except ValidationError as error:
        raise ConfigError(visible(explain_validation(error, schema, origins))) from None
    except yaml.YAMLError as error:
        raise ConfigError(visible(explain_yaml(error))) from None
    except RecursionError as error:
        raise ConfigError(visible(explain_recursion(error))) from None
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        if rejected := _config_error_behind(error):  # raised by a resolver of ours
            raise rejected from None
        raise ConfigError(visible(explain_composition(error))) from error
