"""Judges: models and verifiers that get episodes and decide terms of the reward.

schema        the keys of judges, and of the terms that they decide
judge         asks for verdicts and reads them, keeps the answers within the budget
vllm_server   the server of `judge=vllm`
ruler         a term that compares the episodes of a group
criteria      a term that scores each episode by criteria
trajectories  shows episodes to judges and verifiers
verdicts      keeps answers on disk
verifier      the term `verifier`
cli, check    the command `judge check`, on recorded episodes
"""

from openenv_pipe.registry import BlockType, Command, Extra

EXTRA = Extra(
    name="judges",
    commands=(Command(name="judge", target="openenv_pipe.extras.judges.cli:app"),),
    blocks=(
        BlockType(
            block="judge",
            type="openai",
            config="openenv_pipe.extras.judges.schema:OpenAIJudgeConfig",
            build="openenv_pipe.extras.judges.judge:open_judge",
        ),
        BlockType(
            block="judge",
            type="vllm",
            config="openenv_pipe.extras.judges.schema:VllmJudgeConfig",
            build="openenv_pipe.extras.judges.judge:open_judge",
            check="openenv_pipe.extras.judges.vllm_server:check_judge_server",
        ),
        BlockType(
            block="reward.terms",
            type="ruler",
            config="openenv_pipe.extras.judges.schema:RulerTerm",
            build="openenv_pipe.extras.judges.ruler:build_ruler",
        ),
        BlockType(
            block="reward.terms",
            type="judge",
            config="openenv_pipe.extras.judges.schema:JudgeTerm",
            build="openenv_pipe.extras.judges.criteria:build_criteria",
        ),
        BlockType(
            block="reward.terms",
            type="verifier",
            config="openenv_pipe.extras.judges.schema:VerifierTerm",
            build="openenv_pipe.extras.judges.verifier:opened_verifier",
            open="openenv_pipe.extras.judges.verifier:open_verifier",
        ),
    ),
    unused="openenv_pipe.extras.judges.unused:RULES",
)
