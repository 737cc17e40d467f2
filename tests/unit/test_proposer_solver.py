"""The game of `examples/proposer_solver`, without its server."""

from itertools import product
from pathlib import Path

import yaml

ENVS = Path(__file__).parents[2] / "examples/proposer_solver/envs"


def test_the_manifest_has_the_range_of_what_a_step_earns(monkeypatch):
    monkeypatch.syspath_prepend(str(ENVS))
    from proposer_solver.game import NUM_WORDS, Game

    earned = []
    for answers in product([True, False], repeat=NUM_WORDS):
        game = Game()
        steps = [game.play("abcd"), *(game.play(game.word[::-1] * right) for right in answers)]
        assert game.is_over
        assert sum(step.get("solver", 0) for step in steps) == sum(answers) / NUM_WORDS
        earned += [sum(step.values()) for step in steps]
    manifest = yaml.safe_load((ENVS / "proposer_solver/openenv.yaml").read_text())
    assert manifest["validation"]["reward"]["range"] == [min(earned), max(earned)]
