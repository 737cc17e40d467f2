"""The block types of the core, listed as an extra lists its own."""

from openenv_pipe.registry import BlockType, Extra

_SCHEMA = "openenv_pipe.config.schema"
# The blocks that types can be registered for, with the base class of their keys; empty for a key
# whose value is the name of a type.
BASES = {
    "host": f"{_SCHEMA}.host:HostBlock",
    "cluster": f"{_SCHEMA}.cluster:ClusterBlock",
    "agent": f"{_SCHEMA}.agent:AgentBlock",
    "agent.sandbox": f"{_SCHEMA}.agent:SandboxBlock",
    "engine": f"{_SCHEMA}.engine_base:EngineBlock",
    "engine.launch": "",
    "engine.weight_transfer": "",
    "judge": f"{_SCHEMA}.judge:JudgeBlock",
    "reward.terms": f"{_SCHEMA}.reward_terms:Term",
    "tracker": f"{_SCHEMA}.tracker:TrackerBlock",
    "trainer.warm_start.source": f"{_SCHEMA}.source:SourceBlock",
}


def _type(
    block: str, name: str, config: str, build: str, check: str = "", trial: str = ""
) -> BlockType:
    """Make an entry from targets without the prefix that all of them share."""
    return BlockType(
        block=block,
        type=name,
        config=f"{_SCHEMA}.{config}" if config else "",
        build=f"openenv_pipe.{build}",
        check=f"openenv_pipe.{check}" if check else "",
        trial=f"openenv_pipe.{trial}" if trial else "",
    )


_EPISODE_TERM = "rewards.terms:EpisodeTerm"

CORE = Extra(
    name="core",
    blocks=(
        _type(
            "host",
            "process",
            config="host:ProcessHostConfig",
            build="environments.hosts.process:ProcessHost",
            check="environments.hosts.process:check_process_host",
        ),
        _type(
            "host",
            "python",
            config="host:PythonHostConfig",
            build="environments.hosts.python:build_python_host",
            check="environments.hosts.python:check_python_host",
        ),
        _type("cluster", "local", "cluster:LocalClusterConfig", "pipeline.cluster:Cluster"),
        _type("agent", "loop", "agent:LoopAgentConfig", "rollout.episode:own_loop"),
        _type("engine", "local", "engine:LocalEngineConfig", "pipeline.engines:open_local"),
        _type(
            "engine",
            "vllm",
            config="engine_vllm:VllmEngineConfig",
            build="pipeline.engines:open_vllm",
            check="engines.vllm.check:check_servers",
            trial="engines.vllm.check:try_servers",
        ),
        _type("engine", "openai", "engine:OpenAIEngineConfig", "pipeline.engines:open_openai"),
        _type(
            "engine",
            "scripted",
            config="engine:ScriptedEngineConfig",
            build="pipeline.engines:open_scripted",
            check="pipeline.engines:check_scripted",
        ),
        _type(
            "engine",
            "python",
            config="engine:PythonEngineConfig",
            build="pipeline.engines:open_python",
            check="pipeline.engines:check_python",
            trial="pipeline.engines:describe_python",
        ),
        # The engine makes the servers of these two itself.
        _type("engine.launch", "managed", "", "engines.vllm.servers:own_processes"),
        _type("engine.launch", "attach", "", "engines.vllm.launch:AttachedVllmServer"),
        _type("engine.weight_transfer", "files", "", "engines.vllm.transfer:build_files"),
        _type("judge", "none", "judge:NoJudgeConfig", "rewards.scoring:no_judge"),
        _type("reward.terms", "env", "reward_terms:EnvTerm", _EPISODE_TERM),
        _type("reward.terms", "success", "reward_terms:SuccessTerm", _EPISODE_TERM),
        _type("reward.terms", "turns", "reward_terms:TurnsTerm", _EPISODE_TERM),
        _type("reward.terms", "unusable", "reward_terms:UnusableTerm", _EPISODE_TERM),
        _type("reward.terms", "length", "reward_terms:LengthTerm", _EPISODE_TERM),
        _type("reward.terms", "overlong", "reward_terms:OverlongTerm", _EPISODE_TERM),
        _type(
            "reward.terms", "brevity", "reward_terms:BrevityTerm", "rewards.terms:BrevityOfGroup"
        ),
        _type("reward.terms", "regex", "reward_terms:RegexTerm", _EPISODE_TERM),
        _type(
            "reward.terms", "python", "reward_terms:PythonTerm", "rewards.python_term:FunctionTerm"
        ),
        _type("reward.terms", "rubric", "reward_terms:RubricTerm", "rewards.rubric:ReportedTerm"),
        _type(
            "tracker",
            "python",
            config="tracker:PythonTrackerConfig",
            build="trackers.python:build_python_tracker",
            check="trackers.python:check_python_tracker",
        ),
        _type(
            "trainer.warm_start.source",
            "scripted",
            config="source:ScriptedSourceConfig",
            build="pipeline.demonstrations:play_scripted",
        ),
    ),
)
