"""Which settings do not go together: a table of rules for the schema, `train`, `eval` and `check`.

A rule that needs only the configuration belongs here; bounds of a single key are in
`config/schema/`, and what has to be measured is checked where it is used.
"""

from typing import TYPE_CHECKING, cast

from openenv_pipe.config.rules import engine, environment, reward, trainer
from openenv_pipe.config.rules.rule import BrokenRulesError, Moment, Rule
from openenv_pipe.registry import extras, load

if TYPE_CHECKING:  # The schema reads the rules.
    from openenv_pipe.config.schema.base import Document
    from openenv_pipe.config.schema.run import RunConfig

__all__ = ["BrokenRulesError", "Moment", "Rule", "all_rules", "check_rules"]

RULES = (*environment.RULES, *reward.RULES, *engine.RULES, *trainer.RULES)


def all_rules() -> list[Rule]:
    return [*RULES, *(rule for extra in extras() if extra.rules for rule in load(extra.rules))]


def check_rules(config: "Document", *moments: Moment) -> list[Rule]:
    """Check the rules of these moments, and return them.

    Rules about blocks that the configuration lacks are skipped: an environment alone has no
    `model`.

    Raises BrokenRulesError: settings do not go together; it lists all violations.
    """
    blocks = set(type(config).model_fields)
    rules = [rule for rule in all_rules() if rule.when in moments and rule.blocks <= blocks]
    whole = cast("RunConfig", config)  # These rules read only blocks that it has.
    messages = [message for rule in rules for message in rule.violations(whole)]
    if "beside" in blocks:
        for name, part in whole.environments.items():
            found = (message for rule in rules for message in rule.violations(part) if name)
            messages += [f"beside.{name}: {each}" for each in found if each not in messages]
    if messages:
        raise BrokenRulesError(messages)
    return rules
