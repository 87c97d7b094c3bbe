"""The sections of a run's configuration: one per concern, each handed alone to the code that uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rltool.config.algorithm import AlgorithmConfig, CriticConfig
from rltool.config.base import Config, OwnFamily, OwnFunction, is_list
from rltool.config.data import DataConfig
from rltool.config.parallel import ParallelLayout
from rltool.config.reward import RewardConfig
from rltool.config.rollout import (
    DeadlinesConfig,
    EnginesConfig,
    EvalConfig,
    RolloutConfig,
    SamplingConfig,
    WeightsConfig,
)
from rltool.config.serve import ServedModel


class ModelConfig(Config):
    path: Path
    """Hugging Face directory, a torch_dist directory written by convert-ckpt, or a name of the Hugging Face hub
    (`Qwen/Qwen3-0.6B`, with `@REVISION` or without)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters and activations of the trainer; bfloat16 keeps fp32 master weights and gradients."""
    teacher_path: Path | None = None
    """Weights of the teacher, of the same architecture and shape as the model: for algorithm.advantage = "distill",
    algorithm.distill_coef, algorithm.distill_kl_coef, or a function of your own."""
    teacher: str | None = None
    """In place of teacher_path: a model of [models.NAME], of any size, with the model's tokenizer. Its engines score
    the responses as they come; needs sampling.temperature = 1."""
    family: OwnFamily | None = None
    """`my_family:FAMILY`, a model family of your own (docs/extending.md); `rltool models check` compares it with
    transformers."""
    trust_remote_code: bool = False
    """Let transformers run code that comes with the tokenizer; code of the model is never run by the trainer."""


LoraTarget = Literal["qkv", "proj", "gate_up", "down", "experts"]


class LoraConfig(Config):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): training changes them alone, and the model stays as it is
    loaded."""

    rank: int = Field(default=0, ge=0)
    """Of the adapter of each product. 0: there are none, and all weights are trained."""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """What an adapter adds is multiplied with alpha / rank."""
    targets: Literal["all-linear"] | tuple[LoraTarget, ...] = "all-linear"
    """Which products of each layer have one: qkv (of latent attention and gated delta nets all that make queries, keys
    and values), proj (attention's output), gate_up and down (of MLPs and shared experts), experts; all-linear: all of
    these. Routers, embeddings and the output head have none."""
    init: Path | None = None
    """An adapter of the peft format, or a checkpoint of a run with one, that training begins from; its rank, alpha and
    targets must be these. None: A is drawn at random and B is 0, so that the first policy is the model itself."""

    @field_validator("targets", mode="before")
    @classmethod
    def _no_table(cls, value: Any) -> Any:
        named = [value] if isinstance(value, str) else value
        tables = [name for name in named if name in TABLES] if is_list(named) else []
        if tables:
            raise ValueError(
                f"{', '.join(map(repr, tables))}: the embedding and the output head have no adapters; choose among "
                "qkv, proj, gate_up, down, experts"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> LoraConfig:
        if self.targets != "all-linear" and (not self.targets or len(set(self.targets)) < len(self.targets)):
            raise ValueError('targets names no product, or one twice; "all-linear" names all')
        changed = [n for n, f in type(self).model_fields.items() if getattr(self, n) != f.default]
        if not self.rank and changed:
            raise ValueError(
                f"{', '.join(changed)} would have no effect: rank is 0, so there are no adapters; set rank, such as 16"
            )
        return self

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / self.rank


TABLES = ("head", "lm_head", "output_layer", "embedding", "embeddings", "embed_tokens")


class TrainerConfig(Config):
    """The Megatron side. world_size is the number of ranks, one bundle each."""

    world_size: int = Field(default=1, ge=1)
    """Ranks, one Ray bundle each: a multiple of tensor_parallel x pipeline_parallel; the quotient is data parallel."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there are GPUs for the ranks (found by torch on this host, or declared by the cluster at
    ray.address), else cpu."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Must divide the attention heads, their query groups and the feed-forward size."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Must divide the number of layers."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share the tokens of each sequence; keys and values are gathered, queries stay."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks over which the experts of each layer are sharded; they are taken from the data- and context-parallel
    ranks."""
    sequence_parallel: bool = False
    """Cut norms and residuals along the sequence over the tensor-parallel ranks; needs tensor_parallel above 1."""
    distributed_optimizer: bool = False
    """Each data-parallel rank holds its share of the fp32 master weights and Adam moments, in place of all of them."""
    overlap_grad_reduce: bool = True
    """Sum gradients over data-parallel ranks while the backward pass of the last micro-batch goes on, in place of after
    it."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass. selective: norms and the gated activation of the MLP (cheap);
    full: whole layers, only their inputs are kept, and the gated activation of the others."""
    recompute_layers: int | None = Field(default=None, ge=1)
    """recompute = "full": how many layers of each pipeline stage, from its first; None: all."""
    recompute_head: bool = True
    """Compute the logits again in the backward pass. False: keep the probabilities of the loss tokens in the model's
    dtype (2 bytes x vocabulary a token in bf16, 5 GB for 16,384 tokens and 152,000 words) and save that product."""
    attention: Literal["auto", "torch", "flash_attention_4", "transformer_engine"] = "auto"
    """The kernel on CUDA in bf16. auto: that of package flash-attn-4, else Transformer Engine's, where it is installed
    and gives torch's results on a small batch at the start; else torch's."""
    expert_products: Literal["auto", "grouped", "sequential"] = "auto"
    """How the experts of a mixture run: those of a layer at once by grouped matrix products, or one after the other.
    auto: grouped on CUDA in bf16, where torch has a kernel for the GPU that gives the results of single products on a
    small batch."""
    router_bias_update_rate: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """By how much each optimizer step moves the correction bias of an expert (DeepSeek-V3, GLM-4.5) up or down, to give
    all of a layer as many tokens. 0 leaves the biases as they are; DeepSeek-V3 was pretrained with 0.001."""
    compile: bool = True
    """On CUDA: norms, rotary positions, SwiGLU and the head's softmax as one kernel each (needs Triton and a C
    compiler)."""
    residual: Literal["model", "float32"] = "model"
    """The residual stream between layers: in the model's dtype, or in float32, which halves the trainer's own rounding
    (docs/benchmarks.md)."""
    fake_quantization: bool = False
    """The policy's linear weights are rounded to FP8, as engines.quantization = "fp8" has them; the optimizer keeps
    unrounded float32 masters (straight-through). Hugging Face exports, and runs that start from a checkpoint's weights,
    have the rounded ones."""
    head_chunk_tokens: int = Field(default=2048, ge=1)
    """Tokens whose logits exist at a time, in fp32; the logits of a micro-batch are never held whole."""
    balance: Literal["tokens", "flops"] = "tokens"
    """What is balanced over data-parallel ranks. flops also counts attention, which grows with the square of the
    length."""
    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Packed tokens of one micro-batch on one rank. Ranks of context parallelism hold one micro-batch together, of so
    many times as many tokens. A longer single sample is an error at the start of the step."""
    logprob_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """The same in passes that train nothing: log-probabilities (old, reference's, teacher's, of serve-trainer) and
    values of a critic, in every layout. They keep no activations, so more tokens fit. None:
    max_tokens_per_micro_batch; not below it."""
    shared_prefixes: bool = False
    """Tokens that samples of a micro-batch begin with alike (one prompt, branches of one context) are computed once;
    samples that begin alike go to one micro-batch, of which the distinct tokens are counted."""
    gpus: tuple[int, ...] = ()
    """GPU indices of this host for the ranks and then for managed engines, in this order; empty: the first ones that no
    engine and no live run holds. Not on a cluster at ray.address, whose Ray decides."""
    share_gpus: bool = False
    """With gpus: take them although an engine or another run is on them. What both need is not compared with what a GPU
    has: leave memory with the engine's own flags (--gpu-memory-utilization)."""
    cpus_per_rank: float = Field(default=1.0, gt=0)
    """Ray CPUs that each rank's bundle asks for."""
    torch_threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch in each rank. None: OMP_NUM_THREADS where it is set; else at most 4 on a GPU, and torch's
    own choice without one."""
    rendezvous_timeout: float = Field(default=300.0, gt=0)
    """Seconds for the ranks to find each other, and for any one collective."""

    @property
    def micro_batch_tokens(self) -> int:
        """Packed tokens that the ranks of one data-parallel replica take at a time."""
        return self.max_tokens_per_micro_batch * self.context_parallel

    @property
    def forward_tokens(self) -> int:
        """Packed tokens of a micro-batch on one rank where nothing is trained."""
        return self.logprob_tokens_per_micro_batch or self.max_tokens_per_micro_batch

    @property
    def layout(self) -> ParallelLayout:
        """All parallel sizes, checked, and data parallel, which follows from them."""
        return ParallelLayout(
            self.world_size,
            tp=self.tensor_parallel,
            pp=self.pipeline_parallel,
            cp=self.context_parallel,
            ep=self.expert_parallel,
        )

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        # Sizes that do not divide raise here, where they are written.
        _ = self.layout
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor_parallel above 1: it cuts the sequence over those ranks")
        if self.shared_prefixes and self.context_parallel > 1:
            raise ValueError(
                "shared_prefixes computes a prefix once for all samples that begin with it, and context_parallel cuts "
                "each sample over ranks on its own; leave one of them out"
            )
        if self.forward_tokens < self.max_tokens_per_micro_batch:
            raise ValueError(
                f"logprob_tokens_per_micro_batch = {self.forward_tokens} is below max_tokens_per_micro_batch = "
                f"{self.max_tokens_per_micro_batch}, whose training needs more memory; raise it, or leave it out"
            )
        if self.recompute_layers is not None and self.recompute != "full":
            raise ValueError(
                f'recompute_layers is how many layers recompute = "full" covers, but recompute is "{self.recompute}"'
            )
        return self


class OptimizerConfig(Config):
    """Adam with decoupled weight decay, Megatron's optimizer and schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    min_lr: float = Field(default=0.0, ge=0)
    """Where the decay ends; not above lr."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    decay_style: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps until min_lr; None: all that the run takes."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Not applied to biases and norms."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.98, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """Global gradient norm limit; 0 does not clip."""
    max_skipped_steps: int = Field(default=3, ge=1)
    """Consecutive optimizer steps with a non-finite loss or gradient after which the run stops."""


class CheckpointConfig(Config):
    every_steps: int = Field(default=0, ge=0)
    """0: only at the end, on SIGTERM and on a stop."""
    save_at_end: bool = True
    """Also after the last step, regardless of every_steps. False: what ends a run early still writes one."""
    async_save: bool = False
    """Training goes on while a checkpoint is written; it waits only while its state is copied to the CPU's memory,
    which must hold that copy."""
    keep_last: int = Field(default=0, ge=0)
    """How many of the newest checkpoints stay; older ones are deleted once a newer one is complete. 0 keeps all."""
    keep_best: int = Field(default=0, ge=0)
    """How many of the best by best_metric stay beside those; needs keep_last above 0."""
    best_metric: str | None = None
    """Name of a metric, such as eval/heldout/accuracy. A checkpoint of a step that did not measure it is never among
    the best."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of best_metric is the best."""
    on_save_failure: Literal["stop", "continue"] = "stop"
    """Whether a checkpoint or a Hugging Face export that cannot be written ends the run, or is warned of (a checkpoint
    also counted). Those at the end of the run must succeed."""
    save_hf_every: int = Field(default=0, ge=0)
    """Also export Hugging Face weights after this many steps each; 0: never."""
    save_hf_at_end: bool = False
    """Export Hugging Face weights after the last step."""

    @model_validator(mode="after")
    def _best(self) -> CheckpointConfig:
        if self.keep_best and not self.keep_last:
            raise ValueError(
                "keep_best has no effect while keep_last = 0 keeps every checkpoint; set keep_last above 0"
            )
        if bool(self.keep_best) != (self.best_metric is not None):
            raise ValueError(
                "keep_best and best_metric go together: how many, and by what (such as best_metric = "
                '"eval/heldout/accuracy")'
            )
        return self


class RayConfig(Config):
    address: str | None = None
    """Address of a running cluster; None starts a local one."""
    num_cpus: float | None = Field(default=None, gt=0)
    """CPUs declared to a local cluster; None: exactly what the plan needs."""


class MonitorConfig(Config):
    tensorboard: bool = True
    """Write event files to RUN/tensorboard."""
    wandb_project: str | None = None
    """Log to this project of Weights & Biases (`pip install 'rltool[wandb]'`); its own environment sets the rest:
    WANDB_API_KEY, WANDB_MODE=offline."""
    mlflow_experiment: str | None = None
    """Log to this experiment of MLflow (`pip install 'rltool[mlflow]'`); MLFLOW_TRACKING_URI names the server."""
    endpoint_port: int = Field(default=0, ge=0, le=65535)
    """Port of the driver's loopback endpoint, which serves `/metrics` for Prometheus; 0: any free one."""
    samples_per_step: int = Field(default=8, ge=0)
    """Samples of each step that are kept in RUN/samples for `rltool samples` and `report`, evenly from the worst to the
    best reward; 0: none."""
    category_key: str | None = None
    """Field of a sample's metadata, such as its task or its difficulty: reward and pass rate are measured for each
    value of it, 20 at most. None: not by category."""
    pass_reward: float = 1.0
    """A sample has passed from this reward on: what pass rates and pass@k count."""
    metrics: OwnFunction | None = None
    """f(samples: list[Sample]) -> dict[str, float], called with the samples of every batch; recorded as own/NAME."""
    logger: OwnFunction | None = None
    """f(run: LoggedRun) -> an object with log(step, metrics) and close(): a logger of your own, beside the others.
    docs/extending.md has its contract."""
    logprob_difference_limit: float | None = Field(default=None, gt=0)
    """Mean |trainer - engine| log-probability of a step's response tokens above which the run stops before its
    optimizer step. None: 0.1 where trainer and all engines compute in float32, else 0.2."""
    profile_steps: str | None = Field(default=None, pattern=r"^\d+:\d+$")
    """A:B: torch.profiler's trace of steps A to B - 1, counted as in metrics.jsonl, of every rank to RUN/profile."""
    memory_snapshot: int | None = Field(default=None, ge=0)
    """The step whose allocations on the GPU every rank records to RUN/profile; CUDA only."""

    @property
    def profiled(self) -> range:
        """The steps of profile_steps."""
        if self.profile_steps is None:
            return range(0)
        first, end = self.profile_steps.split(":")
        return range(int(first), int(end))

    @model_validator(mode="after")
    def _some_step(self) -> MonitorConfig:
        if self.profile_steps is not None and not self.profiled:
            raise ValueError(
                f"profile_steps = {self.profile_steps!r} names no step: A:B is steps A to B - 1, counted from 0"
            )
        return self


class Sections(Config):
    """All sections of a run, without the rules between them: rltool/config/train.py's TrainConfig has both."""

    model: ModelConfig
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of data order, sampling and everything random in the trainer."""
    steps: int = Field(default=100, ge=1)
    """Rollouts of the whole run."""
    optimizer_steps_per_rollout: int = Field(default=1, ge=1)
    """Must divide rollout.prompts_per_step: prompt groups stay together."""
    epochs_per_rollout: int = Field(default=1, ge=1)
    """How often each rollout is trained on: its optimizer steps are made again, on the same samples with the same
    advantages and old log-probabilities."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step; None derives it. Given, it must come out: prompts x samples = global batch x
    optimizer steps."""
    trainer: TrainerConfig = TrainerConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    engines: EnginesConfig = EnginesConfig()
    models: dict[str, ServedModel] = Field(default_factory=dict)
    """name -> a model beside the policy; see below."""
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    ray: RayConfig = RayConfig()
    monitor: MonitorConfig = MonitorConfig()

    @property
    def needs_engines(self) -> bool:
        """Policy training generates; supervised training uses engines only to evaluate, and only if there are some."""
        some = self.engines.mode != "external" or bool(self.engines.external)
        return self.algorithm.loss == "policy" or (some and bool(self.eval.sets))

    @property
    def samples_per_optimizer_step(self) -> int:
        """The global batch size of policy training."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt // self.optimizer_steps_per_rollout

    @property
    def part_weights(self) -> dict[str, float] | None:
        """By name, the weights of reward.parts where the advantages are made of these one by one; else None."""
        return {part.name: part.weight for part in self.reward.parts} if self.algorithm.uses_reward_parts else None

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps on one rollout, all epochs together."""
        return self.optimizer_steps_per_rollout * self.epochs_per_rollout

    @property
    def policy_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        only_critic = self.critic.warmup_rollouts if self.algorithm.uses_critic else 0
        return (self.steps - only_critic) * self.updates_per_rollout
