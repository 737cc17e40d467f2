"""The configuration of a whole run, and whether its blocks fit together."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from openenv_pipe.config.schema.agent import AgentConfig
from openenv_pipe.config.schema.base import Document, NumProcesses, Seed
from openenv_pipe.config.schema.cluster import ClusterConfig, RayClusterConfig
from openenv_pipe.config.schema.engine import EngineConfig
from openenv_pipe.config.schema.engine_vllm import VllmEngineConfig
from openenv_pipe.config.schema.env import EnvConfig
from openenv_pipe.config.schema.eval import EvalConfig
from openenv_pipe.config.schema.host import HostConfig
from openenv_pipe.config.schema.judge import JudgeConfig
from openenv_pipe.config.schema.model import ModelConfig, TinyModelConfig
from openenv_pipe.config.schema.reward import RewardConfig
from openenv_pipe.config.schema.reward_judged import RulerTerm
from openenv_pipe.config.schema.reward_terms import OverlongTerm
from openenv_pipe.config.schema.tasks import TaskRange
from openenv_pipe.config.schema.tracker import TrackerConfigs
from openenv_pipe.config.schema.trainer import TrainerConfig


class ServingConfig(Document):
    """An environment and its host: the blocks that `openenv-pipe env` needs."""

    env: EnvConfig
    host: HostConfig


class RunConfig(Document):
    """The configuration of a run (conf/config.yaml)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = Field(
        description="the experiment's name: the run folder is <runs_dir>/<name>/<number>"
    )
    seed: Seed = Field(description="seed of all randomness of the run")
    runs_dir: str = Field(description="folder of all run folders")
    device: Literal["auto", "cpu", "cuda"] = Field(
        description="where the learner runs; auto: cuda if there is a GPU"
    )
    num_threads: NumProcesses | None = Field(
        description="torch's threads on the CPU; null: one per core"
    )
    env: EnvConfig
    host: HostConfig
    reward: RewardConfig
    judge: JudgeConfig
    agent: AgentConfig
    model: ModelConfig
    engine: EngineConfig
    cluster: ClusterConfig
    trainer: TrainerConfig
    eval: EvalConfig
    tracker: TrackerConfigs = Field(description="the trackers, by name")

    @model_validator(mode="after")
    def _blocks_fit_together(self) -> "RunConfig":
        tasks = self.env.tasks.eval  # The size of other types is known once they are read.
        if isinstance(tasks, TaskRange) and self.eval.num_tasks > tasks.num_tasks:
            raise ValueError(
                f"eval.num_tasks={self.eval.num_tasks} is more than "
                f"env.tasks.eval.num_tasks={tasks.num_tasks}"
            )
        if self.host.type == "none":
            self._check_no_environment()
        self._check_measured_reward()
        best = self.trainer.checkpoint.best
        if best and best.metric.startswith("eval/") and not self.eval.during.every:
            raise ValueError(
                f"trainer.checkpoint.best.metric={best.metric} needs evaluations during training, "
                "and eval.during.every=0 means none; set every to a number of steps"
            )
        if (
            isinstance(self.model, TinyModelConfig)
            and self.env.max_episode_tokens > self.model.max_length
        ):
            raise ValueError(
                f"env.max_episode_tokens={self.env.max_episode_tokens} is more than "
                f"model.max_length={self.model.max_length}"
            )
        self._check_learner_nodes()
        if self.vllm_nodes is not None:
            self._check_vllm_on_nodes()
        is_sharded = self.trainer.devices > 1 and self.trainer.parallel == "fsdp"
        if self.model.quantization != "none" and is_sharded:
            raise ValueError(
                f"model.quantization={self.model.quantization} with trainer.parallel=fsdp: "
                "four-bit matrices cannot be sharded; set trainer.parallel=data"
            )
        if self.engine.type == "vllm" and self.engine.sleep in ("level1", "level2"):
            self._check_sleep(self.engine)
        for name, term in self.reward.terms.items():
            if isinstance(term, OverlongTerm):
                self._check_overlong(name, term)
            if term.asks_judge and self.judge.type == "none":
                raise ValueError(
                    f"reward.terms.{name} asks a judge, and there is none; set judge=openai, "
                    "judge.base_url and judge.model"
                )
            if isinstance(term, RulerTerm) and self.trainer.group_size < 2:
                raise ValueError(
                    f"reward.terms.{name} compares the episodes of a group, and "
                    f"trainer.group_size={self.trainer.group_size}; set it to 2 or more"
                )
        return self

    def _check_measured_reward(self) -> None:
        """Reject decisions by the reward of evaluations in which it is not measured."""
        during, reward, best = self.eval.during, self.reward, self.trainer.checkpoint.best
        num_samples = during.samples_per_task or self.eval.samples_per_task
        terms = reward.relative if num_samples == 1 else reward.standardised
        uses = {
            "eval.during.stop.measure=reward": during.stop.at is not None
            and during.stop.measure == "reward",
            "trainer.checkpoint.best.metric=eval/reward": best is not None
            and best.metric == "eval/reward",
        }
        if terms and (key := next((key for key, is_used in uses.items() if is_used), None)):
            raise ValueError(
                f"{key} with reward.terms.{terms[0]}: its values compare the episodes of a group, "
                "so evaluations do not measure the reward; use success"
                + ("" if reward.standardised else ", or set eval.samples_per_task=2 or more")
            )

    @property
    def ranks_per_node(self) -> int:
        """How many of trainer.devices are on each node of the learner, this machine included."""
        cluster = self.cluster
        return self.trainer.devices // (cluster.learner_nodes if cluster.type == "ray" else 1)

    @property
    def vllm_nodes(self) -> RayClusterConfig | None:
        """The cluster on whose nodes the run starts vLLM servers; None: it starts none there."""
        cluster = self.cluster
        return cluster if cluster.type == "ray" and cluster.vllm_on_nodes else None

    def _check_vllm_on_nodes(self) -> None:
        """Refuse engines and ways to publish that need the run's machine."""
        engine, key = self.engine, "cluster.vllm_on_nodes=true"
        if engine.type != "vllm" or engine.launch != "managed":
            launch = f" engine.launch={engine.launch}" if engine.type == "vllm" else ""
            raise ValueError(
                f"{key} with engine.type={engine.type}{launch}: only servers of engine=vllm "
                "engine.launch=managed are started on nodes; set these, or "
                "cluster.vllm_on_nodes=false"
            )
        if engine.weight_transfer == "ipc":
            raise ValueError(
                f"{key} with engine.weight_transfer=ipc, which reaches only a server on the "
                "learner's GPU; set engine.weight_transfer=broadcast or files"
            )
        if engine.sleep in ("level1", "level2"):
            raise ValueError(
                f"{key} with engine.sleep={engine.sleep}: the servers are not on the learner's "
                "GPU, so sleep would free no memory for it; set engine.sleep=auto or never"
            )

    def _check_learner_nodes(self) -> None:
        cluster, devices = self.cluster, self.trainer.devices
        if cluster.type == "ray" and devices % cluster.learner_nodes:
            raise ValueError(
                f"cluster.learner_nodes={cluster.learner_nodes} with trainer.devices={devices}: "
                "each node has the same number of devices; set trainer.devices to a multiple of "
                f"{cluster.learner_nodes}"
            )

    def _check_no_environment(self) -> None:
        agent = self.agent
        if agent.type == "loop" or (agent.type == "program" and agent.reward_from == "environment"):
            raise ValueError(
                f"host.type=none with agent.type={agent.type}: without an environment only "
                "clients and Harbor can play; set agent=client, agent=harbor, or another host"
            )
        if self.trainer.warm_start.steps:
            raise ValueError(
                f"trainer.warm_start.steps={self.trainer.warm_start.steps} with host.type=none: "
                "its policy needs an environment to play in; set steps to 0"
            )
        for name in ("train", "eval"):
            if (kind := getattr(self.env.tasks, name).type) == "server":
                raise ValueError(
                    f"env.tasks.{name}.type={kind} with host.type=none: no server lists tasks; "
                    "set another type"
                )

    def _check_sleep(self, engine: VllmEngineConfig) -> None:
        if self.trainer.max_staleness:
            raise ValueError(
                f"engine.sleep={engine.sleep} with trainer.max_staleness="
                f"{self.trainer.max_staleness}: the server must sample while the learner works; "
                "set engine.sleep=never, or max_staleness=0"
            )
        if engine.sleep == "level2" and self.model.lora.rank and engine.publish != "merged":
            raise ValueError(
                "engine.sleep=level2 drops the base weights that adapters need; set "
                "engine.sleep=level1, or engine.publish=merged"
            )

    def _check_overlong(self, name: str, term: OverlongTerm) -> None:
        begins = (1.0 - term.buffer_share) * term.limit_tokens
        if begins >= self.env.max_episode_tokens:
            raise ValueError(
                f"reward.terms.{name} begins at {begins:g} tokens, and env.max_episode_tokens="
                f"{self.env.max_episode_tokens} ends every episode before; lower its limit_tokens"
            )
