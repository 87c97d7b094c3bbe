"""Engines that rltool starts: groups of them (`serve-engines --config`, `train`), the flags of serve-engines, and one
process, fully resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rltool.config.base import Config

ENGINES: dict[str, str] = {
    "vllm": "rltool.engines.dialects.vllm:VllmDialect",
    "sglang": "rltool.engines.dialects.sglang:SglangDialect",
}
"""Engine kind -> the import path of its dialect, which rltool.engines.dialects.table imports. In the order in which a
server of unknown kind is asked what it is: rltool's plugin gives vLLM SGLang's /model_info too."""


def _known(kind: str) -> str:
    if kind not in ENGINES:
        raise ValueError(f"unknown engine {kind!r}; known are {', '.join(ENGINES)}")
    return kind


EngineKind = Annotated[str, AfterValidator(_known)]
"""One of ENGINES."""
Device = Literal["cuda", "cpu"]
EngineDtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
"""The names that both vLLM (ModelDType) and SGLang (--dtype) take."""
WeightBackend = Literal["rltool", "nccl"]
Role = Literal["regular", "prefill", "decode", "placeholder"]
Task = Literal["generate", "classify"]
"""What a model is served for. classify: a sequence classifier, such as a reward model with a scalar head; never
synced."""

POLICY = "policy"
"""Name of the model that the trainer trains; every other one stands in [models.NAME]."""
NAME_PATTERN = r"^[A-Za-z0-9][\w.-]*$"


class EngineGroup(Config):
    """Engines that are alike: `[[engines.groups]]`, any number of them."""

    name: str = Field(default="default", pattern=NAME_PATTERN)
    """In endpoints.json and in plans; each group has one of its own."""
    engine: EngineKind = "vllm"
    count: int = Field(default=1, ge=1)
    """How many engines."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size. More GPUs of one engine follow from its own flags, such as --pipeline-parallel-size."""
    role: Role = "regular"
    """prefill and decode: halves of one service, behind a router (SGLang) or asked one after the other (vLLM).
    placeholder: GPUs that are kept free, tp for each of count; no process."""
    model: str = POLICY
    """policy is model.path; another name is that of [models.NAME]."""
    flags: tuple[str, ...] = ()
    """Passed to each engine's own command line untouched."""
    served_name: str | None = None
    """Name on the servers' /v1/models; None: that of the model."""
    gpus: tuple[int, ...] = ()
    """serve-engines: GPU indices of this host, given to the engines in order; empty: the next ones. train chooses for
    all groups (trainer.gpus)."""
    engines_per_gpu: int = Field(default=1, ge=1)
    """This many consecutive engines share the same GPUs, and start one after the other, or all at once where flags
    have --kv-cache-memory-bytes. Each has its part of the memory, unless flags set how much. More tokens where one
    engine's CPU work holds it back: small models."""
    device: Device | None = None
    """None: with serve-engines cuda, in a run what the trainer runs on."""
    host: str | None = None
    """Address to listen on. None: loopback, on a Ray cluster of several hosts the address of each node."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first engine, the next ones follow; 0 picks free ports."""
    dtype: EngineDtype | None = None
    """Engine dtype; None: float32 on the CPU, the model's own on GPUs."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens; None: the model's own, on a CPU under vLLM at most 2048."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the first engine of all groups; the others count up, or replicas would sample the same responses."""
    trust_remote_code: bool = False
    """Let the engine run code that comes with the model."""
    engine_python: Path | None = None
    """Interpreter of the environment that has the engine; None: rltool's own."""
    weight_backend: WeightBackend = "rltool"
    """How vLLM receives weights: rltool is the plugin's (nccl, ipc, gloo, disk or delta), nccl vLLM's own."""
    return_routed_experts: bool = False
    """Mixtures of experts: replies can carry the experts that the router chose (algorithm.routing_replay, for which a
    run sets it by itself). vLLM on GPUs, SGLang."""
    lora_rank: int = Field(default=0, ge=0)
    """Largest rank of an adapter that the engine takes under a name; 0: it takes none, unless the run has
    weights.lora_sync = "adapter"."""
    lora_slots: int = Field(default=4, ge=1)
    """Adapters that it holds at a time: at least rollout.max_staleness + 2."""
    ready_timeout: float = Field(default=600.0, gt=0)
    """Seconds from launch until an engine serves."""

    @field_validator("role", mode="before")
    @classmethod
    def _no_encoders(cls, role: Any) -> Any:
        if role == "encoder":
            raise ValueError(
                'role = "encoder" is no longer there: rltool samples from text alone, so no engine of it would ask an '
                "encoder; leave the group out"
            )
        return role

    @model_validator(mode="after")
    def _possible(self) -> EngineGroup:
        if self.role == "placeholder" and self.flags:
            raise ValueError("a placeholder starts no process, so its flags would have no effect")
        if self.role == "placeholder" and self.engines_per_gpu > 1:
            raise ValueError("a placeholder keeps whole GPUs: leave engines_per_gpu out")
        if self.return_routed_experts and self.role != "regular":
            raise ValueError(
                f'return_routed_experts with role = "{self.role}": the experts of a prompt and those of its response '
                "would be chosen at different engines; leave it out"
            )
        if self.count < self.engines_per_gpu:
            raise ValueError(
                f"engines_per_gpu = {self.engines_per_gpu} with count = {self.count}: GPU memory would be "
                "left unused"
            )
        return self


class ServedModel(Config):
    """A model beside the policy: a judge, a reward model, a frozen reference. It has engines and a router of its own,
    and reward functions reach it as `context.model(NAME)`."""

    path: Path | None = None
    """Hugging Face directory: what engines of its groups serve, and its tokenizer. None: only for engines in
    `external`, which are then asked with token ids alone."""
    update_weights: bool = False
    """False: no trainer ever touches its weights. `train` updates the policy alone, and refuses true."""
    task: Task = "generate"
    """generate: a judge, a frozen reference. classify: a model with a classification head, such as a reward model with
    one label: vLLM is started with --runner pooling, SGLang with --is-embedding; docs/rewards.md."""
    external: tuple[str, ...] = ()
    """host:port or @endpoints.json of engines of this model that run already; train."""
    api_key_file: Path | None = None
    """Bearer key for addresses given as host:port."""
    start_router: bool = False
    """Start a router in front of its engines; with prefill and decode groups there is always one."""
    sleep: Literal["host", "disk"] = "host"
    """engines.mode = "colocate": where its weights are while its engines sleep. host: in the host's memory; disk: they
    are dropped, and loaded again from `path` at each wake, within deadlines.sync."""

    @model_validator(mode="after")
    def _classifies(self) -> ServedModel:
        if self.task == "classify" and self.update_weights:
            raise ValueError('task = "classify" and update_weights = true: no trainer syncs such a model; leave it out')
        if self.task == "classify" and self.start_router:
            raise ValueError('task = "classify": its engines are asked directly; leave start_router out')
        return self


class ServeConfig(Config):
    """The command line of serve-engines."""

    model: Path
    """Hugging Face model directory, or a name of the hub, with `@REVISION` or without."""
    engine: EngineKind = "vllm"
    num_engines: int = Field(default=1, ge=1)
    """Each has tp GPUs, of its own unless engines_per_gpu is set."""
    engines_per_gpu: int = Field(default=1, ge=1)
    """So many engines share the same GPUs, and their memory."""
    gpus: tuple[int, ...] = ()
    """GPU indices of this host, given to engines in order, tp at a time. Empty with device cuda: as many as it takes,
    from 0."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size: GPUs per engine."""
    device: Device = "cuda"
    host: str = "127.0.0.1"
    """Address to listen on; another one than loopback is reachable from other hosts, guarded by the key, not
    encrypted."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first engine, the next ones follow; 0 picks free ports."""
    served_name: str = Field(default=POLICY, pattern=NAME_PATTERN)
    """Name of the model in endpoints.json and on the servers' /v1/models."""
    update_weights: bool = True
    """False: a model that is never synced, such as a judge; recorded in endpoints.json; train does not sync it."""
    task: Task = "generate"
    """classify: a model with a classification head, such as a reward model; with update_weights = false."""
    dtype: EngineDtype | None = None
    """Engine dtype; None: float32 on the CPU, the model's own on GPUs."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens; None: the model's own, on a CPU under vLLM at most 2048."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the first engine; the others count up, or replicas would sample the same responses."""
    trust_remote_code: bool = False
    """Let the engine run code that comes with the model."""
    engine_python: Path | None = None
    """Interpreter of the environment that has the engine; None: rltool's own."""
    weight_backend: WeightBackend = "rltool"
    """How vLLM receives weights: rltool is the plugin's (nccl, ipc, gloo, disk or delta), nccl vLLM's own."""
    return_routed_experts: bool = False
    """Mixtures of experts: replies can carry the experts that the router chose (algorithm.routing_replay)."""
    lora_rank: int = Field(default=0, ge=0)
    """Largest rank of an adapter that the engine takes; 0: it takes none."""
    lora_slots: int = Field(default=4, ge=1)
    """Adapters that it holds at a time."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: linear layers are quantised when they are loaded, SGLang's in a copy in the run's directory; for runs with
    engines.quantization = "fp8"."""
    exact: bool = False
    """vLLM's batch-invariant kernels, which the trainer of a run with algorithm.exact computes with too."""
    ready_timeout: float = Field(default=600.0, gt=0)
    """Seconds from its launch until an engine serves."""
    max_restarts: int = Field(default=5, ge=0)
    """How often an engine that dies is started again, while serve-engines watches it. One that has lived for 10 minutes
    since has all of them again; one that has none left stays dead. 0: the others end with it."""
    extra_args: tuple[str, ...] = ()
    """Passed to each engine's own command line untouched."""

    @model_validator(mode="after")
    def _classifies(self) -> ServeConfig:
        if self.task == "classify" and self.update_weights:
            raise ValueError("--task classify goes with --no-update-weights: no trainer syncs such a model")
        return self

    @property
    def group(self) -> EngineGroup:
        """The same as one group of engines."""
        return EngineGroup(
            engine=self.engine, count=self.num_engines, tp=self.tp, model=self.served_name, flags=self.extra_args,
            gpus=self.gpus, engines_per_gpu=self.engines_per_gpu, device=self.device, host=self.host, port=self.port,
            dtype=self.dtype, max_model_len=self.max_model_len, seed=self.seed,
            trust_remote_code=self.trust_remote_code, engine_python=self.engine_python,
            weight_backend=self.weight_backend, ready_timeout=self.ready_timeout,
            return_routed_experts=self.return_routed_experts, lora_rank=self.lora_rank, lora_slots=self.lora_slots,
        )  # fmt: skip


class EngineLaunch(Config):
    """One process of an engine, fully resolved: what a dialect builds argv and environment from. An engine on several
    hosts has one on each; that of node_rank 0 serves."""

    index: int
    engine: EngineKind = "vllm"
    model_name: str = POLICY
    group: str = "default"
    role: Role = "regular"
    node: str = ""
    """The host that it is started on, by the name that the plan has for it; empty: this one."""
    address: str = ""
    """Where others reach it; empty: at `host`."""
    node_rank: int = 0
    nodes: int = 1
    dist_init: str | None = None
    """host:port at which the processes of an engine on several hosts meet."""
    bootstrap_port: int | None = None
    """prefill: where decode engines ask for the keys and values of a prompt."""
    rendezvous_port: int | None = None
    """Port of torch.distributed's store, of an engine on one host that takes it as a flag; None: it picks one itself
    (Launches.takes_rendezvous_port)."""
    pp: int = 1
    """Pipeline-parallel size, and below data-parallel size, as the engine's own flags have them."""
    dp: int = 1
    update_weights: bool = True
    task: Task = "generate"
    return_routed_experts: bool = False
    lora_rank: int = 0
    lora_slots: int = 4
    quantization: dict[str, Any] | None = None
    """A quantization_config in the place of its model's, whose weights are quantised when they are loaded."""
    exact: bool = False
    ready_timeout: float = 600.0
    model: Path
    host: str
    port: int
    gpus: tuple[int, ...]
    tp: int
    device: Device
    served_name: str
    dtype: str | None
    max_model_len: int | None
    seed: int
    trust_remote_code: bool
    python: Path
    """Interpreter of the environment in which the engine is installed."""
    key_file: Path
    """0600 file with the bearer key; its path, not the key, goes into environment or argv."""
    boot_id: str
    """uuid4 hex, new at every start of this engine; the plugin reports it back."""
    weight_backend: WeightBackend
    work_dir: Path
    """Where a dialect may have a config file written (0600), for what must not stand in argv."""
    extra_args: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """GPUs of the engine over all its hosts."""
        return self.tp * self.pp * self.dp
