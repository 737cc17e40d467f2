"""Types, ranges and meaning of every key. The only place of them; values live in `conf/`.

No field has a default: what a run does is what its YAML says. Models are frozen and refuse
unknown keys. Units are in the names: `_s` seconds, `_mb` mebibytes, `num_` counts.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, bool | int | float) else value


Text = Annotated[str, BeforeValidator(_text)]  # YAML and the command line turn 7 into a number
DottedPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$", examples=["wordle.rewards:name"])]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Port = Annotated[int, Field(ge=1, le=65535)]
ServerUrl = Annotated[
    str,
    Field(
        pattern=r"^(https?|wss?)://[^/?#@\s]+(/[^?#\s]*)?$", examples=["https://a.example/wordle"]
    ),
]


class Block(BaseModel):
    """Base of all blocks: frozen, no unknown keys, no silent conversions from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# --- env: the environment, how to talk to it, and its tasks ------------------------------------


class TextAdapterConfig(Block):
    """Observation to chat message by Jinja, reply to action by a regular expression."""

    type: Literal["text"]
    system: str | None = Field(description="system message; a Jinja template of the observation")
    first: str = Field(description="Jinja template of the first user message")
    following: str = Field(description="Jinja template of the user message after each step")
    unusable: str = Field(
        description="Jinja template of the answer to an unusable reply: {{ why }}"
    )
    pattern: str = Field(description="regex searched in the reply; its named groups are the action")


class JsonAdapterConfig(Block):
    """The action as a JSON object, in the form that the environment's own schema gives it.

    Templates see the observation's fields and {{ action_schema }}.
    """

    type: Literal["json"]
    system: str | None = Field(description="system message; a Jinja template")
    first: str | None = Field(
        description="Jinja template of the first user message; null: the observation as JSON"
    )
    following: str | None = Field(
        description="Jinja template of the user message after each step; null: as first"
    )
    unusable: str = Field(
        description="Jinja template of the answer to an unusable reply: {{ why }}"
    )


class ToolAdapterConfig(Block):
    """The tools of an MCP environment, called in replies; several calls in one are allowed."""

    type: Literal["tool"]
    system: str | None = Field(description="system message; a Jinja template of the observation")
    first: str | None = Field(
        description="Jinja template of the first user message; null: the observation as JSON"
    )
    following: str | None = Field(
        description="Jinja template of a call's result; null: its text or its error"
    )
    unusable: str = Field(
        description="Jinja template of the answer to an unusable reply: {{ why }}"
    )
    plain_reply: Literal["final", "unusable"] = Field(
        description="what a reply without a call is: the end of the episode, or a mistake"
    )


class PythonAdapterConfig(Block):
    """What YAML cannot say: a class with `open`, `read`, `follow` and `refuse`."""

    type: Literal["python"]
    target: DottedPath
    options: dict[str, Any]


AdapterConfig = Annotated[
    TextAdapterConfig | JsonAdapterConfig | ToolAdapterConfig | PythonAdapterConfig,
    Field(discriminator="type"),
]


class TaskRange(Block):
    """Tasks 0..num_tasks-1, each one a reset with its own seed."""

    type: Literal["range"]
    num_tasks: PositiveInt
    seed_start: NonNegativeInt = Field(description="task i is reset with seed seed_start + i")
    index_key: str | None = Field(description="reset keyword that receives i; null: none")
    reset: dict[str, Any] = Field(description="further reset keywords, the same for every task")


class ListedTasks(Block):
    """Base of the task sets whose number is known when they are read."""

    seed_start: NonNegativeInt | None = Field(
        description="task i is reset with seed seed_start + i; null: each with seed 0"
    )
    reset: dict[str, Any] = Field(description="further reset keywords, the same for every task")


class TaskRows(ListedTasks):
    """Base of the task sets made of rows. A keyword `seed` of a row is that task's seed."""

    columns: Annotated[dict[str, str], Field(min_length=1)] | None = Field(
        description="column: reset keyword that receives it; null: every column, by its own name"
    )


class TaskFile(TaskRows):
    """A task for each row of a local file."""

    type: Literal["file"]
    path: str = Field(description="JSON objects, one a line, or .csv with a header")


class TaskDataset(TaskRows):
    """A task for each row of a data set that the package `datasets` loads."""

    type: Literal["dataset"]
    path: str = Field(description="an id on the hub, a folder, or a format such as json")
    config: str | None = Field(description="where a data set has several; null: its only one")
    split: str = Field(description="of the data set; slices such as train[:90%] too")
    revision: str | None
    data_files: str | list[str] | None = Field(description="of a format; null: all that are there")


class TaskServer(ListedTasks):
    """The tasks that the environment's server lists: reset keywords `split` and `index`."""

    type: Literal["server"]
    split: str = Field(description="as the server names it")


TaskSetConfig = Annotated[
    TaskRange | TaskFile | TaskDataset | TaskServer, Field(discriminator="type")
]


class TasksConfig(Block):
    """The two splits. No task may be in both: the same reset keywords and the same seed."""

    order: Literal["shuffle", "seed", "curriculum"] = Field(
        description="of training. shuffle: anew for each pass; seed: as they are listed; "
        "curriculum: mostly those that the model solves at times"
    )
    train: TaskSetConfig
    eval: TaskSetConfig

    @model_validator(mode="after")
    def _splits_are_disjoint(self) -> "TasksConfig":
        """Of ranges; of all others when their rows are known."""
        train, evaluation = self.train, self.eval
        if not (isinstance(train, TaskRange) and isinstance(evaluation, TaskRange)):
            return self
        seeds_overlap = (
            train.seed_start < evaluation.seed_start + evaluation.num_tasks
            and evaluation.seed_start < train.seed_start + train.num_tasks
        )
        if seeds_overlap and train.reset == evaluation.reset:
            raise ValueError(
                "the train and eval splits share tasks: their seeds overlap and their reset "
                "keywords are equal; move eval.seed_start or give each a split keyword"
            )
        return self


class EnvConfig(Block):
    """An environment and the limits of its episodes."""

    name: str
    package: str | None = Field(
        description="folder of an OpenEnv package; a bare name is an envs/ one"
    )
    command: list[str] | None = Field(description="starts the server instead; {host} and {port}")
    variables: dict[str, Text] = Field(description="environment variables of the server")
    reset_timeout_s: PositiveFloat
    step_timeout_s: PositiveFloat
    max_message_mb: PositiveInt
    max_turns: PositiveInt
    max_reply_tokens: PositiveInt
    max_episode_tokens: PositiveInt
    success_reward: float = Field(
        description="the environment's reward, summed, from which on it is a success"
    )
    adapter: AdapterConfig
    tasks: TasksConfig


# --- host: where environment servers run -------------------------------------------------------


class ProcessHostConfig(Block):
    """Servers as child processes on the loopback interface."""

    type: Literal["process"]
    num_servers: PositiveInt
    sessions_per_server: PositiveInt
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        description="of the first server; null: any free one"
    )
    start_timeout_s: PositiveFloat
    stop_timeout_s: PositiveFloat
    max_restarts: NonNegativeInt


class DockerHostConfig(Block):
    """Servers in containers of this machine's Docker daemon, one each."""

    type: Literal["docker"]
    num_servers: PositiveInt
    sessions_per_server: PositiveInt
    image: str | None = Field(
        description="pulled if it is not there; null: built from env.package's Dockerfile"
    )
    dockerfile: str = Field(description="within env.package, the folder that is built")
    build_args: dict[str, Text]
    build_timeout_s: PositiveFloat = Field(description="of a build or a pull")
    container_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        description="where the server listens; null: `port` of the package's openenv.yaml"
    )
    network: Literal["none-outbound", "bridge"] = Field(
        description="none-outbound: no way out, by a socket in; bridge: Docker's own network"
    )
    mem_limit_mb: PositiveInt
    cpus: PositiveFloat
    pids_limit: PositiveInt = Field(description="processes and threads")
    tmp_mb: PositiveInt = Field(description="size of /tmp, kept in memory")
    read_only: bool = Field(description="all but /tmp")
    gpus: Literal["all"] | list[Text] | None = Field(description="ids as nvidia-smi has them")
    start_timeout_s: PositiveFloat
    stop_timeout_s: PositiveFloat
    max_restarts: NonNegativeInt


class AttachHostConfig(Block):
    """Servers that run already, here or elsewhere."""

    type: Literal["attach"]
    urls: Annotated[list[ServerUrl], Field(min_length=1)]
    sessions_per_server: PositiveInt
    headers: dict[str, str] = Field(description="of every request and every connection")
    verify_tls: bool = Field(description="false: a server may be anybody")
    ca_file: str | None = Field(description="authorities to trust beside the system's, in PEM")
    connect_timeout_s: PositiveFloat
    max_outage_s: NonNegativeFloat = Field(
        description="how long a server may be gone before the run ends"
    )

    @model_validator(mode="after")
    def _urls_differ(self) -> "AttachHostConfig":
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls names a server twice; raise sessions_per_server instead")
        return self


class KubernetesHostConfig(Block):
    """Servers in pods of a Kubernetes cluster, one each."""

    type: Literal["kubernetes"]
    num_servers: PositiveInt
    sessions_per_server: PositiveInt
    image: str = Field(description="as the cluster's nodes pull it")
    image_pull_secrets: list[str]
    container_port: Port
    kubeconfig: str | None = Field(
        description="null: $KUBECONFIG or ~/.kube/config, or inside a cluster the pod's own account"
    )
    context: str | None = Field(description="of the kubeconfig; null: its current one")
    namespace: str
    access: Literal["port_forward", "cluster"] = Field(
        description="port_forward: through the cluster's API; cluster: by services, from inside"
    )
    network: Literal["none-outbound", "open"] = Field(
        description="none-outbound: a NetworkPolicy without a way out; open: no policy"
    )
    mem_limit_mb: PositiveInt
    cpus: PositiveFloat
    tmp_mb: PositiveInt = Field(description="size of /tmp, kept in memory")
    read_only: bool = Field(description="all but /tmp")
    run_as_non_root: bool = Field(description="refuse images that run as root")
    gpus: NonNegativeInt
    secrets: list[str] = Field(description="Secrets whose entries become environment variables")
    pod_spec: dict[str, Any] = Field(
        description="further fields of the pods' spec, such as nodeSelector and tolerations"
    )
    start_timeout_s: PositiveFloat = Field(description="scheduling and pulling included")
    stop_timeout_s: PositiveFloat
    max_restarts: NonNegativeInt


HostConfig = Annotated[
    ProcessHostConfig | DockerHostConfig | AttachHostConfig | KubernetesHostConfig,
    Field(discriminator="type"),
]


# --- reward: named, weighted terms over an episode ---------------------------------------------


class Term(Block):
    """Base of the reward terms. `per_turn` credits each turn with its own value."""

    weight: float
    per_turn: bool


class EnvTerm(Term):
    """The environment's own reward: the sum over the turns, or the last one."""

    type: Literal["env"]
    use: Literal["sum", "last"]


class SuccessTerm(Term):
    """1 for an episode that reached env.success_reward."""

    type: Literal["success"]


class TurnsTerm(Term):
    """The number of turns used."""

    type: Literal["turns"]


class UnusableTerm(Term):
    """The number of replies that could not be turned into an action."""

    type: Literal["unusable"]


class LengthTerm(Term):
    """The number of tokens that the model wrote."""

    type: Literal["length"]


class RegexTerm(Term):
    """The number of replies in which the pattern is found."""

    type: Literal["regex"]
    pattern: str


class PythonTerm(Term):
    """fn(episode, **keywords): a number, or one number per turn."""

    type: Literal["python"]
    target: DottedPath
    keywords: dict[str, Any]
    use: Literal["sum", "mean"] = Field(description="of the turns' values, for the episode's")


TermConfig = Annotated[
    EnvTerm | SuccessTerm | TurnsTerm | UnusableTerm | LengthTerm | RegexTerm | PythonTerm,
    Field(discriminator="type"),
]


class RewardConfig(Block):
    """An episode's reward is the weighted sum of its terms."""

    terms: Annotated[dict[str, TermConfig], Field(min_length=1)]


# --- model -------------------------------------------------------------------------------------


class LoraConfig(Block):
    """Low-rank adapters by peft. rank 0: full training."""

    rank: NonNegativeInt
    alpha: PositiveFloat
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)]
    target_modules: str | list[str]


class _Model(Block):
    lora: LoraConfig
    dtype: Literal["float32", "bfloat16"] = Field(description="of the weights")
    autocast: Literal["float32", "bfloat16"] = Field(description="of matrix products")
    chat_template: str | None = Field(description="Jinja chat template; null: the tokenizer's own")


class TinyModelConfig(_Model):
    """A Qwen3 with random weights and a byte-level tokenizer, built on the spot from the seed."""

    type: Literal["tiny"]
    seed: NonNegativeInt = Field(description="of the weights")
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_size: PositiveInt
    max_length: PositiveInt
    rope_theta: PositiveFloat
    init_std: PositiveFloat

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyModelConfig":
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            raise ValueError(
                f"num_heads={self.num_heads} has to be a multiple of num_kv_heads="
                f"{self.num_kv_heads}, and head_size={self.head_size} even"
            )
        return self


class HubModelConfig(_Model):
    """Any causal LM of transformers: a folder, or an id on the model hub. Safetensors only."""

    type: Literal["hub"]
    path: str
    revision: str | None


ModelConfig = Annotated[TinyModelConfig | HubModelConfig, Field(discriminator="type")]


# --- engine: where tokens come from ------------------------------------------------------------


class LocalEngineConfig(Block):
    """transformers in this process, batched over all waiting episodes."""

    type: Literal["local"]
    max_batch: PositiveInt


class ScriptedEngineConfig(Block):
    """Replies of a scripted policy: fn(observations, random) -> reply. Evaluation only."""

    type: Literal["scripted"]
    policy: DottedPath


EngineConfig = Annotated[LocalEngineConfig | ScriptedEngineConfig, Field(discriminator="type")]


# --- trainer -----------------------------------------------------------------------------------


class OptimizerConfig(Block):
    """AdamW, or Muon for the hidden matrices with AdamW for all else, and their schedule."""

    type: Literal["adamw", "muon"]
    lr: PositiveFloat
    beta1: Beta
    beta2: Beta
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat
    schedule: Literal["constant", "linear", "cosine"] = Field(
        description="of the decay after lr_warmup_steps"
    )
    lr_warmup_steps: NonNegativeInt
    final_lr_share: Share = Field(description="the last step's learning rate as a share of lr")


class WarmStartConfig(Block):
    """Supervised steps on episodes that a scripted policy plays. steps 0: no warm start."""

    steps: NonNegativeInt
    policy: DottedPath | None
    num_episodes: NonNegativeInt = Field(description="played once, then sampled from")
    episodes_per_step: PositiveInt
    optimizer: OptimizerConfig

    @model_validator(mode="after")
    def _needs_a_policy(self) -> "WarmStartConfig":
        if self.steps and not (self.policy and self.num_episodes):
            raise ValueError("steps > 0 needs a policy and num_episodes > 0")
        return self


class AdvantageConfig(Block):
    """How rewards of a group become advantages."""

    scale: Literal["std", "none"]
    discount: Share = Field(description="of later turns' per-turn rewards; 0: each turn for itself")


class LossConfig(Block):
    """The policy loss by its name in the literature, and what is added to it."""

    type: Literal["grpo", "dr_grpo", "dapo"]
    clip_low: PositiveFloat
    clip_high: PositiveFloat
    kl_coef: NonNegativeFloat = Field(description="0: no reference model is kept")


class TrainerConfig(Block):
    """Group-relative policy optimisation, and the optional warm start before it."""

    steps: NonNegativeInt
    tasks_per_step: PositiveInt
    group_size: Annotated[int, Field(ge=2)]
    temperature: PositiveFloat
    updates_per_step: PositiveInt = Field(description="optimizer steps on each step's samples")
    tokens_per_batch: PositiveInt = Field(
        description="token budget of one forward and backward pass"
    )
    warm_start: WarmStartConfig
    advantage: AdvantageConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    checkpoint_every: PositiveInt


# --- eval and tracker --------------------------------------------------------------------------


class EvalConfig(Block):
    """The same tasks and seeds for every model that is evaluated."""

    num_tasks: PositiveInt
    samples_per_task: PositiveInt
    temperature: NonNegativeFloat = Field(description="0: greedy")
    num_resamples: PositiveInt = Field(description="of the bootstrap")
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)]


class TrackerConfig(Block):
    """Where metrics go beside metrics.jsonl, which is always written."""

    type: Literal["none", "tensorboard"]


class ServingConfig(Block):
    """An environment and where it runs: what `openenv-pipe env` needs of a run."""

    env: EnvConfig
    host: HostConfig


class RunConfig(Block):
    """Everything a run is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    seed: NonNegativeInt
    runs_dir: str
    device: Literal["auto", "cpu", "cuda"]
    num_threads: PositiveInt | None = Field(description="of torch on the CPU; null: one per core")
    env: EnvConfig
    host: HostConfig
    reward: RewardConfig
    model: ModelConfig
    engine: EngineConfig
    trainer: TrainerConfig
    eval: EvalConfig
    tracker: TrackerConfig

    @model_validator(mode="after")
    def _blocks_fit_together(self) -> "RunConfig":
        tasks = self.env.tasks.eval  # of the other types, when their number is known
        if isinstance(tasks, TaskRange) and self.eval.num_tasks > tasks.num_tasks:
            raise ValueError(
                f"eval.num_tasks={self.eval.num_tasks} is more than "
                f"env.tasks.eval.num_tasks={tasks.num_tasks}"
            )
        if (
            isinstance(self.model, TinyModelConfig)
            and self.env.max_episode_tokens > self.model.max_length
        ):
            raise ValueError(
                f"env.max_episode_tokens={self.env.max_episode_tokens} is more than "
                f"model.max_length={self.model.max_length}"
            )
        return self
