"""A profile as a table, and as a line about its steps."""

from openenv_pipe.extras.profile.activities import MEANINGS
from openenv_pipe.extras.profile.command import Profiled
from openenv_pipe.system.tables import Column, Fit, Table


def as_table(profiled: Profiled) -> Table:
    table = Table(
        Column("activity"),
        Column("s per step", justify="right"),
        Column("of the time", justify="right"),
        Column("alone", justify="right"),
        Column("", drop=1, fit=Fit.FOLD, style="dim"),
    )
    step_s = profiled.duration_s / len(profiled.steps)
    for label, share in profiled.shares.items():
        table.add_row(
            label,
            f"{share.total * step_s:.2f}",
            f"{share.total:.0%}",
            f"{share.alone:.0%}",
            MEANINGS[label],
        )
    nothing = profiled.nothing
    table.add_row(
        "none", f"{nothing * step_s:.2f}", f"{nothing:.0%}", "", "none of these: waits of threads"
    )
    return table


def summary(profiled: Profiled) -> str:
    """Return the speed of the measured steps in one line."""
    num_steps = len(profiled.steps)
    parts = [
        f"{num_steps} step{'s' * (num_steps > 1)} after the first",
        f"{profiled.duration_s / num_steps:.2f} s each",
        f"{profiled.mean('time/tokens_per_s'):.0f} sampled tokens/s",
    ]
    if computed := profiled.mean("time/learner_tokens_per_s"):
        mfu = profiled.mean("time/mfu")
        parts.append(f"{computed:.0f} tokens/s in the update ({mfu:.0%} of the matrix rate)")
    return ", ".join(parts)
