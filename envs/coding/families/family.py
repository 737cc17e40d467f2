"""A family of problems: a documented reference function and the values of its keyword argument."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

FAMILIES: list["Family"] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """For each value, `reference(*arguments, **{parameter: value})` solves one problem."""

    reference: Callable[..., Any]
    parameter: str
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.reference.__name__

    def statement(self, value: Any) -> str:
        """Return the reference's docstring on one line, with the value filled in."""
        text = " ".join(inspect.getdoc(self.reference).split())
        return text.replace("{" + self.parameter + "}", repr(value))

    def argument_types(self) -> dict[str, Any]:
        """Return the type annotations of a solution's arguments, in order."""
        return {name: argument.annotation for name, argument in self._arguments()}

    def signature(self) -> str:
        """Return the first line of a solution, such as `def total(numbers: list[int]) -> int:`."""
        signature = inspect.signature(self.reference)
        arguments = [argument for _, argument in self._arguments()]
        return f"def {self.name}{signature.replace(parameters=arguments)}:"

    def solution(self, value: Any) -> str:
        """Return the reference as a submission whose body assigns the parameter in a line."""
        source = textwrap.dedent(inspect.getsource(self.reference))
        function = ast.parse(source).body[0]
        assert isinstance(function, ast.FunctionDef)
        lines = [f"{self.parameter} = {value!r}"]
        lines += [ast.unparse(statement) for statement in function.body[1:]]
        return self.signature() + "\n" + textwrap.indent("\n".join(lines), "    ") + "\n"

    def _arguments(self) -> Iterator[tuple[str, inspect.Parameter]]:
        for name, argument in inspect.signature(self.reference).parameters.items():
            if name != self.parameter:
                yield name, argument


def family(**values: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the reference of a family: `@family(k=(2, 3, 5))`."""
    ((parameter, choices),) = values.items()

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        FAMILIES.append(Family(reference=reference, parameter=parameter, values=choices))
        return reference

    return register
