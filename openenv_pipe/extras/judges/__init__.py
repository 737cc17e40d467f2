"""Judges: models and verifiers that get episodes and decide terms of the reward."""

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
