"""Find what changed since a run was made: code, versions, machine, data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import JsonValue

from openenv_pipe.runs.provenance import find_code_digest, find_machine, find_versions
from openenv_pipe.runs.record import RunRecord

Kind = Literal["code", "versions", "machine", "data", "model"]
# The facts of a run that identify something, by kind. Other facts are measurements.
FACTS: dict[str, Kind] = {
    "env_code": "code",
    "env_files": "code",  # the files behind `env_code`; older runs have only that
    "image": "code",
    "callables": "code",
    "env_functions": "code",
    "program": "code",
    "program_image": "code",
    "tasks": "data",
    "model_digest": "model",
    "tokenizer_digest": "model",
    "teacher_digest": "model",
    "history": "model",
    "forward.sampler": "model",
    "forward.learner": "model",
    "device": "machine",
    "num_threads": "machine",
}

# Kinds that change what rewards measure. This program's own code does not: it is tested.
MEASURING = ("code: ", "data: ")
OWN_CODE = "code: openenv_pipe "
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Difference:
    """One changed thing. `name` is what a user would search for."""

    kind: Kind
    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name} was {self.before}, is {self.now}"


def of_measures(differences: Iterable[str]) -> list[str]:
    """Return those of the differences, as sentences, that make rewards incomparable."""
    return [each for each in differences if each.startswith(MEASURING) and OWN_CODE not in each]


def find_differences(record: RunRecord) -> list[Difference]:
    """Compare what is known before a start: the tool's code, packages, the machine."""
    found = []
    if record.code_digest is not None and record.code_digest != (code := find_code_digest()):
        sha = next((f", commit {each.sha[:10]}" for each in record.checkouts if each.sha), "")
        before = f"{_short(record.code_digest)}{sha}"
        found.append(Difference("code", "openenv_pipe", before, _short(code)))
    found += _unequal("versions", "", record.versions, find_versions())
    now, then = find_machine(), record.machine
    for name in ("cpu", "num_cpus", "gpus"):
        if getattr(now, name) != getattr(then, name):
            texts = str(getattr(then, name)), str(getattr(now, name))
            found.append(Difference("machine", name, *texts))
    return found


def find_other_facts(
    before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]
) -> list[Difference]:
    """Compare what a run finds out after its start: environment, tasks, model."""
    found = []
    then, since = _with_forward_passes(before), _with_forward_passes(now)
    known = then.keys() & since.keys()
    for key, kind in FACTS.items():
        if key in known and not (key == "env_code" and "env_files" in known):
            found += _unequal(kind, key, then[key], since[key])
    others, others_now = before.get("beside"), now.get("beside")
    if isinstance(others, Mapping) and isinstance(others_now, Mapping):
        for env in sorted(others.keys() & others_now.keys()):
            one, one_now = others[env], others_now[env]
            assert isinstance(one, Mapping) and isinstance(one_now, Mapping)
            found += [
                replace(each, name=f"beside.{env}.{each.name}")
                for each in find_other_facts(one, one_now)
            ]
    return found


def _with_forward_passes(facts: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Add the members of `forward` as keys: numbers in its reasons are measurements."""
    forward = facts.get("forward")
    parts = forward.items() if isinstance(forward, Mapping) else ()
    return {**facts, **{f"forward.{name}": value for name, value in parts}}


def _unequal(kind: Kind, name: str, before: object, now: object) -> list[Difference]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        inner = (
            _unequal(kind, f"{name}.{key}" if name else key, before.get(key), now.get(key))
            for key in sorted({*before, *now})
        )
        return [difference for each in inner for difference in each]
    return [] if before == now else [Difference(kind, name, _short(before), _short(now))]


def _short(value: object) -> str:
    text = ABSENT if value is None else str(value)
    return text[:12] if len(text) == 64 else text
