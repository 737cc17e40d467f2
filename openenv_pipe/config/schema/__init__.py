"""The types, ranges and meanings of all configuration keys, one file for each block.

No field has a default: the values are in `conf/`. Models are frozen and reject unknown keys.
Units are in the names: `_s` seconds, `_mb` mebibytes, `num_` counts.
"""

from openenv_pipe.config.rules.environment import POLICY, UNTRAINED
from openenv_pipe.config.schema.adapter import (
    AdapterConfig,
    ExampleExchange,
    JsonAdapterConfig,
    PythonAdapterConfig,
    TextAdapterConfig,
    ToolAdapterConfig,
)
from openenv_pipe.config.schema.base import PythonTarget
from openenv_pipe.config.schema.cluster import LocalClusterConfig
from openenv_pipe.config.schema.endpoint import EndpointBlock
from openenv_pipe.config.schema.engine import (
    LocalEngineConfig,
    OpenAIEngineConfig,
    PythonEngineConfig,
    ScriptedEngineConfig,
)
from openenv_pipe.config.schema.engine_base import EngineCapabilities, TruncationConfig
from openenv_pipe.config.schema.engine_vllm import VllmEngineConfig
from openenv_pipe.config.schema.env import EnvConfig, LeagueConfig, PlayersConfig
from openenv_pipe.config.schema.eval import EvalConfig
from openenv_pipe.config.schema.host import HostConfig, ProcessHostConfig, PythonHostConfig
from openenv_pipe.config.schema.judge import JudgeConfig, NoJudgeConfig
from openenv_pipe.config.schema.loss import LossConfig, PythonLossConfig, SapoLossConfig
from openenv_pipe.config.schema.model import HubModelConfig, ModelConfig, TinyModelConfig
from openenv_pipe.config.schema.reward import (
    ClipTransform,
    MultiplyTransform,
    OnlySuccessTransform,
    RewardConfig,
    StandardiseTransform,
    TransformConfig,
)
from openenv_pipe.config.schema.reward_terms import (
    BrevityTerm,
    EnvTerm,
    EpisodeTermConfig,
    LengthTerm,
    OverlongTerm,
    PythonTerm,
    RegexTerm,
    RubricTerm,
    SuccessTerm,
    Term,
    TurnsTerm,
    UnusableTerm,
)
from openenv_pipe.config.schema.run import RunConfig, ServingConfig
from openenv_pipe.config.schema.source import ScriptedSourceConfig
from openenv_pipe.config.schema.tasks import (
    ListedTasks,
    OrderConfig,
    PythonOrderConfig,
    TaskDataset,
    TaskFile,
    TaskFolders,
    TaskRange,
    TasksConfig,
    TaskServer,
    TaskSetConfig,
    TaskShare,
)
from openenv_pipe.config.schema.tracker import PythonTrackerConfig, TrackerConfig
from openenv_pipe.config.schema.trainer import (
    AdvantageConfig,
    GroupRelativeAdvantageConfig,
    OptimizerConfig,
    PythonAdvantageConfig,
    ReplayConfig,
    TrainerConfig,
    WarmStartConfig,
)
