"""Which environment a server serves: how it is made, its spaces, and its rules in words."""

import inspect
import json
import re
import sys
from typing import Any

import gymnasium

from .spaces import MAX_NUMBERS, SpaceError, count_numbers, describe_actions, plain

ANSI = "ansi"  # the render mode that draws text
COLORS = dict(enumerate(["red", "green", "yellow", "blue", "magenta", "cyan", "white"], start=31))
COLORED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)
DRAWING = "In the drawing, [x] is a highlighted character, and (blue x) a coloured one."


class Source:
    """Makes environments of one id.

    env_id: as `gymnasium.make` takes it; of `module:id`, the module is imported first.
    keywords: a JSON object of keywords of `gymnasium.make`.
    folder: where that module is looked for, in addition to the installed ones.

    Raises ValueError for what Gymnasium cannot make, SpaceError for spaces that have no text.
    """

    def __init__(self, env_id: str, keywords: str, folder: str) -> None:
        self._id = env_id
        self._keywords = _read_keywords(keywords)
        if folder:
            sys.path.append(folder)
        env = self.make()
        if ANSI in env.metadata.get("render_modes", ()):
            self._keywords.setdefault("render_mode", ANSI)
        self.draws = self._keywords.get("render_mode") == ANSI
        self.action_space = env.action_space
        self.sends_values = count_numbers(plain(env.observation_space.sample())) <= MAX_NUMBERS
        self.rules = _rules(env, self.draws)
        env.close()
        if not (self.draws or self.sends_values):
            raise SpaceError(
                f"GYM_ID={env_id!r}: its observations, {env.observation_space}, have more than "
                f"{MAX_NUMBERS} numbers; expected fewer, or an environment that draws text (render "
                "mode 'ansi')"
            )

    def make(self) -> gymnasium.Env[Any, Any]:
        """Make an environment. Raises ValueError."""
        try:
            return gymnasium.make(self._id, **self._keywords)
        except Exception as error:  # The code of an environment may raise anything.
            given = f"GYM_ID={self._id!r} with GYM_KWARGS={json.dumps(self._keywords)}"
            raise ValueError(f"{given}: {type(error).__name__}: {error}") from error


def _read_keywords(text: str) -> dict[str, Any]:
    try:
        keywords = json.loads(text)
    except ValueError as error:
        raise ValueError(f"GYM_KWARGS={text!r} is not JSON: {error}") from None
    if not isinstance(keywords, dict):
        raise ValueError(f'GYM_KWARGS={text!r}: expected an object, such as {{"map_name": "8x8"}}')
    return keywords


def _rules(env: gymnasium.Env[Any, Any], draws: bool) -> str:
    """Return the task in the words of the environment's docstring, and its spaces.

    Gymnasium's docstrings have the headings "## Description" and "## Action Space".
    """
    text = inspect.cleandoc(env.unwrapped.__class__.__doc__ or "")
    summary, *parts = re.split(r"^ *## +", text, flags=re.MULTILINE)
    sections = dict(part.partition("\n")[::2] for part in parts)
    return "\n\n".join(
        inspect.cleandoc(paragraph)
        for paragraph in (
            sections.get("Description", summary),
            f"An action is {describe_actions(env.action_space)}.",
            sections.get("Action Space", ""),
            f"An observation is a value of {env.observation_space}.",
            DRAWING if draws else "",
        )
        if paragraph.strip()
    )


def without_colors(drawing: str) -> str:
    """Return a drawing for terminals with marks in place of its colours."""
    return COLORED.sub(_mark, drawing)


def _mark(match: re.Match[str]) -> str:
    codes = [int(code) for code in match[1].split(";") if code]
    if any(40 <= code <= 47 for code in codes):
        return f"[{match[2]}]"
    color = next((COLORS[code] for code in codes if code in COLORS), None)
    return match[2] if color is None else f"({color} {match[2]})"
