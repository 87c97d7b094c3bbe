"""What generation is configured by: engines, sampling, rollouts, evaluation, weights on their way to engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rltool.config.base import Config, ImportPath, OwnFunction
from rltool.config.data import DataSet
from rltool.config.engine_weights import EngineWeights, TransportName, WhereItCan, contradiction
from rltool.config.evaluation import EvalSamplingConfig, EvalSetConfig, all_or_some
from rltool.config.gateway import ToolParser
from rltool.config.serve import EngineGroup


class EnginesConfig(Config):
    """Who generates, and where it is reached."""

    mode: Literal["external", "managed", "colocate"] = "external"
    """external: engines that are running already. managed: train starts those of engines.groups on GPUs beside the
    trainer's, starts them again when they die, and ends them. colocate: the same on the trainer's own GPUs, in turns:
    engines sleep while it trains, and it is off the GPUs while they generate."""
    external: tuple[str, ...] = ()
    """host:port, http://host:port or @endpoints.json, of external engines."""
    router: str | None = None
    """URL that generation requests go to instead of the engines."""
    foreign_workers: Literal["remove", "refuse"] = "remove"
    """Workers that the router has and that are no engines of the run, at the start and at any time later. remove: they
    are taken out of the router; refuse: the run does not start, or ends with a checkpoint."""
    api_key_file: Path | None = None
    """Bearer key for addresses given as host:port; endpoints.json names its own."""
    lease_seconds: float = Field(default=60.0, ge=10)
    """How long engines with rltool's plugin stay this run's without a sign of life; it renews its leases every few
    seconds. After that another run may take them."""
    newer_versions: bool = False
    """Take engines of a newer version than rltool knows (docs/engines.md has the table) as if they were the newest
    known one."""
    min_serving: int = Field(default=1, ge=1)
    """With fewer engines that serve nothing is generated; the run waits for more (deadlines.engines)."""
    start_router: bool = False
    """managed, colocate, serve-engines --config: start a router in front of the policy's engines."""
    max_restarts: int = Field(default=5, ge=0)
    """managed, colocate, serve-engines --config: how often an engine that has died is started again, and a router that
    was started with it. One that has served for 10 minutes since has all of them again; one that
    has none left stays dead."""
    restart_backoff: float = Field(default=1.0, gt=0)
    """See max_restarts: seconds before the first restart of one, doubled with each that follows, 60 at most."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: the policy's engines have linear layers in FP8 with blocks of 128 x 128, and each sync sends them so:
    half the bytes. Engines that the run does not start need serve-engines --quantization fp8."""
    groups: tuple[EngineGroup, ...] = ()
    """The engines that serve-engines --config and, where mode is managed or colocate, train start; see below."""

    @property
    def started_by_train(self) -> bool:
        """The run starts its engines, and ends them."""
        return self.mode != "external"

    @property
    def shares_gpus(self) -> bool:
        """Engines and ranks are on the same GPUs, and use them in turns."""
        return self.mode == "colocate"

    @field_validator("groups")
    @classmethod
    def _names(cls, groups: tuple[EngineGroup, ...]) -> tuple[EngineGroup, ...]:
        names = [group.name for group in groups]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several groups are called {', '.join(twice)}: give each a name of its own")
        return groups


class SamplingConfig(Config):
    """The distribution that the policy is sampled from, and how long prompts and responses may be."""

    temperature: float = Field(default=1.0, gt=0)
    """The policy trainer divides its logits by it as well."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1 only the most probable tokens are sampled, until their probabilities sum to this. Policy training then
    needs top_k as well, which bounds how many tokens each place has: the engines (vLLM, asked directly) return which
    these are, and the trainer's log-probabilities are over the same."""
    top_k: Annotated[int, AfterValidator(all_or_some)] = -1
    """Sample from this many most probable tokens; -1: from all. For policy training as for top_p."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are filtered out when the data set is read, and counted."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longer responses are cut, and counted as truncated."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside those of generation_config.json and the tokenizer's EOS."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response, with the token that completes one as its last. Special tokens are no text: name those
    in stop_token_ids."""
    min_tokens: int = Field(default=0, ge=0)
    """Minimum response length; engines mask stop tokens until then, which changes log-probabilities: refused for policy
    training."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled that the model gives a probability."""
        return self.top_p < 1 or self.top_k > 0


class RolloutConfig(Config):
    """How samples become batches. Synchronous, one step off-policy and asynchronous training differ in max_staleness
    alone."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompt groups of one batch; with algorithm.loss sft the rows of one step."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Samples of each prompt, which form a group; at least 2 for the policy loss; sft takes each row once."""
    max_staleness: int = Field(default=0, ge=0)
    """Training steps between the weights that are trained and the oldest weights that a trained token was sampled from,
    at most. 0: synchronous; 1: one step off-policy, the next batch is generated while this one trains; more:
    asynchronous."""
    on_stale: Literal["wait", "resample", "mask"] = "wait"
    """A group that is still running when it would become older than max_staleness: the batch waits for it, the group is
    sampled again from its prompt (which discards the longest answers: a bias, so their length is a metric), or its
    tokens that are too old get no loss."""
    oversampling_factor: float = Field(default=1.0, ge=1)
    """Groups started for a batch, over prompts_per_step. Above 1 the first prompts_per_step good groups make the batch;
    the surplus is dropped, or kept with partial_rollout."""
    partial_rollout: bool = False
    """Groups that still run when a batch is complete are aborted and kept: they are finished for a later batch, each
    token with the version it was sampled from. Needs max_staleness of at least 1, or
    algorithm.mask_tokens_older_than. Not with generate_function or agent, which cannot go on where they were; of an
    environment the episodes that were cut off start over."""
    group_filter: Literal["none", "equal_rewards"] | OwnFunction = "none"
    """Groups that are not trained on. equal_rewards: groups whose rewards are all equal (DAPO's dynamic sampling).
    `package.module:function`: f(group: list[Sample]) -> str | None, the reason for dropping the group, or None. Another
    prompt takes the place of each."""
    max_filtered_batches: int = Field(default=10, ge=1)
    """The run stops when this many batches' worth of groups were filtered out for one batch."""
    group_hook: OwnFunction | None = None
    """f(group: list[Sample]) -> None, called when a group is scored; sample.remove_sample = True takes a sample out of
    the loss."""
    batch_hook: OwnFunction | None = None
    """f(samples: list[Sample]) -> list[Sample], called with each batch: what it returns is trained on, once it has been
    checked like any sample."""
    mask_truncated: bool = False
    """Responses that were cut at max_response_tokens get no loss (overlong filtering); they still count in their
    group's baseline."""
    max_failed_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of a batch's groups, though at least one group, that may be dropped because engines refused a request (4xx)
    or failed on it three times; above it the run stops with a checkpoint."""
    batch_size: Literal["dynamic", "trim"] = "dynamic"
    """Where samples were dropped: dynamic trains on all that are left; trim cuts the batch to a multiple of the global
    batch size."""
    requests_per_engine: int = Field(default=64, ge=1)
    """Prompt groups in flight per serving engine."""
    adaptive_concurrency: bool = False
    """Lower and raise the requests in flight by the engines' own queue lengths and KV-cache usage; requests_per_engine
    is the start."""
    function: OwnFunction | None = None
    """`async def f(context: RolloutContext) -> list[Group]`, in place of the built-in rollout: called for each batch,
    it takes prompts, has them sampled and scored, or does so itself, and returns the groups that are trained on."""
    generate_function: ImportPath | None = None
    """`async def f(group: list[Sample], context: GenerateContext) -> None`, in place of the built-in single-turn
    generation."""
    environment: OwnFunction | None = None
    """`package.module:Class`, in place of generate_function: episodes of several turns with an object of this class for
    each sample (docs/agents.md)."""
    environment_arguments: dict[str, Any] = Field(default_factory=dict)
    """What the class is called with."""
    agent: Literal["remote"] | OwnFunction | tuple[str, ...] | None = None
    """In place of generate_function: `package.module:function`, `async def f(task)` that returns a reward, a list of
    them or None; or a list, the words of a command line; or remote: agents that `rltool agents` runs on other hosts,
    which dial rollout.gateway. They talk to a gateway, and each session's trajectories become samples
    (docs/agents.md)."""
    agent_workers: int = Field(default=2, ge=1)
    """agent: processes for an async function, each with many episodes on its event loop."""
    agents_at_once: int = Field(default=64, ge=1)
    """agent: episodes that run side by side; of a command line that many processes."""
    agent_retries: int = Field(default=1, ge=0)
    """agent: further attempts of an episode that failed; then its sample counts as failed."""
    on_sampling: Literal["override", "refuse"] = "refuse"
    """agent: a request for another temperature than the run's, for penalties, or with a parameter that the gateway does
    not know: refused, or served with the run's sampling."""
    trajectory_selection: Literal["all", "longest", "last", "rewarded"] | OwnFunction = "all"
    """agent: which trajectories of an episode are trained: the longest, that of its last turn, those with a turn that
    was paid by itself (all where none was), or f(record) -> list[int], their numbers. What they share with one that is
    not trained is trained with them."""
    train_cancelled: bool = False
    """agent: train what agents were sent of streams that they then cancelled."""
    train_discarded: bool = False
    """agent: train replies that the agent threw away (it sent the same messages again without them)."""
    gateway: str | None = None
    """agent: URL of a gateway that runs already, with the run's sampling and in front of its engines; None: the run
    starts one."""
    gateway_key_file: Path | None = None
    """gateway: file with the key that opens its sessions."""
    max_turns: int = Field(default=16, ge=1)
    """environment, agent: replies of the policy in one episode. An environment's that needs more is cut, and counts as
    truncated; an agent is refused further ones."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """environment, agent: tokens of one reply; None: what is left of sampling.max_response_tokens, which bounds all
    that follows an environment's first prompt, its own tokens too."""
    tool_parser: ToolParser = "auto"
    """environment, agent: how the model writes tool calls and reasoning, by vLLM's names (docs/agents.md); auto: as its
    chat template."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """environment, agent: further arguments of the chat template, such as {enable_thinking = false}."""
    dump: bool = False
    """Write every rollout to RUN/rollouts, for debug train-only to replay."""


class EvalConfig(Config):
    """Accuracy on held-out prompts."""

    sets: dict[str, DataSet] = Field(default_factory=dict)
    """name -> data set, written as in data.train; results appear as eval/NAME/accuracy."""
    every_steps: int = Field(default=0, ge=0)
    """0: only before the first and after the last step."""
    blocking: bool = True
    """The step waits for its evaluation. false: it runs beside training, on what the engines hold meanwhile, and takes
    turns with rollouts for their slots; what it finds stands under the step that it began after."""
    engines: tuple[str, ...] = ()
    """Addresses, written as in engines.external, of engines for evaluation alone: they get the weights when an
    evaluation begins, and hold them until the next. Empty: the engines that rollouts use."""
    api_key_file: Path | None = None
    """Bearer key for eval.engines given as host:port; endpoints.json names its own."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Samples of each prompt; the accuracy is the mean reward over all of them."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    overrides: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """name of a set -> what differs for it; see below."""
    pass_at: tuple[int, ...] = ()
    """The k for which pass@k is measured, at most samples_per_prompt of every set: eval/NAME/pass_at_K."""
    function: OwnFunction | None = None
    """async f(eval_set: EvalSet, context: EvalContext) -> dict[str, float], called for each set in place of the
    built-in evaluation; recorded as eval/SET/NAME. docs/extending.md has its contract."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of evaluation alone: runs that differ in `seed` are evaluated with the same random numbers."""
    dump: bool = False
    """Write the samples of every evaluation to RUN/evals/NAME."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Take only this many of each set, the first."""
    stop_at: float | None = None
    """End the run (successfully, with its checkpoint) once the accuracy of the first set reaches this."""

    @model_validator(mode="after")
    def _sets(self) -> EvalConfig:
        unknown = sorted({*self.overrides} - {*self.sets})
        if unknown:
            raise ValueError(f"overrides for {', '.join(unknown)}, which eval.sets does not have")
        for name in self.sets:
            own = self.overrides.get(name)
            samples = (own and own.samples_per_prompt) or self.samples_per_prompt
            wrong = [k for k in self.pass_at if not 1 <= k <= samples]
            if wrong:
                raise ValueError(
                    f"pass_at {wrong[0]}: set {name!r} has {samples} samples of each prompt, and pass@k needs 1 <= k "
                    "and k <= that; raise samples_per_prompt"
                )
        return self


class WeightsConfig(Config):
    """How weights travel from the trainer to the engines."""

    transport: TransportName = "auto"
    """ipc: within a GPU that trainer and engine share (engines.mode = "colocate"); nccl: from GPU to GPU; gloo: through
    the hosts' memory; these three in pieces of bucket_bytes; disk: a directory that trainer and engines share. auto:
    for each engine the first of these that it can take. delta: what changed alone, through a store."""
    bucket_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    """Tensors are sent together until they are larger than this many bytes: a bucket is closed after the tensor that
    makes it so."""
    advertise_host: str | None = None
    """Address of the trainer as engines see it; None: the local address of the route to each engine."""
    port_range: tuple[int, int] | None = None
    """Ports for rendezvous; None picks free ones."""
    pause_mode: Literal["auto", "keep", "wait", "abort"] = "auto"
    """Requests in flight: keep freezes them, wait lets them finish (not on SGLang), abort cuts them off to be taken up
    again. auto: keep, and abort at engines where no request may run across a sync (SGLang before 0.5.19, prefill and
    decode engines)."""
    disk_dir: Path | None = None
    """Directory that trainer and engines share, for the disk transport: each run has a subdirectory of it; None:
    RUN/weights."""
    staged: WhereItCan = False
    """Tensors arrive in a second buffer while the engine generates, and it is paused only to load them (gloo and nccl,
    vLLM with rltool's plugin). The buffer holds all weights, in each worker: leave memory for it on the GPU with
    --gpu-memory-utilization. auto: so at the engines that can, which true demands of all."""
    lora_sync: Literal["merged", "adapter"] = "merged"
    """What engines get of a run with adapters. merged: all weights, adapters merged in. adapter: the adapter alone,
    under a name of its own at each sync; requests name it, and no engine is paused (docs/lora.md)."""
    delta: WhereItCan = False
    """With transport auto, nccl or gloo: what changed alone is sent over the transfer group, while the engine
    generates (vLLM with rltool's plugin). The trainer's rank 0 and each worker keep a copy of all weights in the host's
    memory; over nccl a bucket of each engine lies on the trainer's GPU besides. auto: so to the engines that can, whole
    weights to the others, which true refuses."""
    sharded: bool = False
    """Each trainer rank sends what it holds of the model to the engines' workers that store it, in the place of rank 0,
    which gathers and sends everything (vLLM with rltool's plugin, docs/weights.md)."""
    store: str | None = None
    """For the delta transport, here or in weights.engines: an absolute directory, or s3://BUCKET/PREFIX, that the
    trainer writes and engines read. One run at a time."""
    anchor_every: int = Field(default=10, ge=1)
    """Deltas, through a store or not: versions from one that goes out whole to the next; between them are patches."""
    verify_tolerance: float | None = Field(default=None, gt=0)
    """Mean |log-probability difference| between engine and trainer allowed in the value check of a new connection.
    None: 0.001 where both compute in float32 and the engine on a CPU, 0.01 where it does elsewhere, 0.2 in 16 bits."""

    engines: tuple[EngineWeights, ...] = ()
    """Engines that get their weights another way; see below."""

    @model_validator(mode="after")
    def _go_together(self) -> WeightsConfig:
        why = contradiction(self.transport, staged=self.staged, delta=self.delta)
        if why is not None:
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _sharded(self) -> WeightsConfig:
        if not self.sharded:
            return self
        if self.lora_sync == "adapter":
            raise ValueError(
                'sharded and lora_sync = "adapter" contradict each other: an adapter is sent by rank 0; leave one out'
            )
        if self.advertise_host is not None:
            raise ValueError("sharded and advertise_host contradict each other: every rank listens, at its own address")
        for _, weights in self.variants():
            others = {"staged": weights.staged, "delta": weights.delta}
            if weights.transport == "delta":
                raise ValueError(
                    'sharded is not implemented for transport = "delta": leave transport at "auto", or leave sharded '
                    "out"
                )
            for name, value in others.items():
                if value:
                    raise ValueError(f"sharded is not implemented with {name}: leave one of them out")
        return self

    @model_validator(mode="after")
    def _engines(self) -> WeightsConfig:
        seen: list[EngineWeights] = []
        for rule, weights in self.variants():
            if rule is None:
                continue
            why = contradiction(weights.transport, staged=weights.staged, delta=weights.delta)
            if why is not None:
                raise ValueError(
                    f"engines with {rule.whom}: {why}; what the section leaves out is as in [weights]: set there "
                    "what holds for these engines"
                )
            first = next((earlier for earlier in seen if earlier.fits_all_of(rule)), None)
            if first is not None:
                raise ValueError(
                    f"engines with {rule.whom}: the section would never decide, for that with {first.whom} comes "
                    "before it and fits all of them: put that for fewer engines first, or leave one out"
                )
            seen.append(rule)
        return self

    @model_validator(mode="after")
    def _store(self) -> WeightsConfig:
        writes = any(weights.transport == "delta" for _, weights in self.variants())
        if writes != (self.store is not None):
            raise ValueError(
                'transport = "delta", here or in engines, and store go together: name a directory that trainer and '
                "engines share, or s3://BUCKET/PREFIX; for patches without a store leave both out, and set delta = true"
            )
        return self

    def rule_of(self, url: str, group: str) -> EngineWeights | None:
        """The section that decides for an engine. url, group: of its EngineEndpoint."""
        return next((rule for rule in self.engines if rule.fits(url, group)), None)

    def of(self, url: str, group: str) -> WeightsConfig:
        """What holds for one engine, see `rule_of`; it has no `engines` itself, and a store where it takes from one."""
        return self._with(self.rule_of(url, group))

    def variants(self) -> Iterator[tuple[EngineWeights | None, WeightsConfig]]:
        """All that `of` may return, each with the section that decides; that of none first."""
        yield None, self._with(None)
        for rule in self.engines:
            yield rule, self._with(rule)

    def _with(self, rule: EngineWeights | None) -> WeightsConfig:
        settings = rule.settings if rule is not None else {}
        store = self.store if settings.get("transport", self.transport) == "delta" else None
        return self.model_copy(update={**settings, "store": store, "engines": ()})


class DeadlinesConfig(Config):
    """Seconds after which a wait fails. The error names its deadline; none is infinite."""

    preflight: float = Field(default=30.0, gt=0)
    """For each given address to answer, before anything starts."""
    start: float = Field(default=300.0, gt=0)
    """For a local Ray to start, and for Ray to have the bundles; the error names what is missing."""
    generate: float = Field(default=600.0, gt=0)
    """For one generation request at one engine; then it counts as failed there, and is sent to another."""
    engines: float = Field(default=300.0, gt=0)
    """For engines.min_serving engines to serve, or to take weights, again, and for the router in front of them to
    answer; then the run ends with a checkpoint. For an engine of a model that rewards ask to serve again; then these
    samples have no reward."""
    group: float = Field(default=3600.0, gt=0)
    """For all samples of one prompt: continuations after aborts, and the whole of an own generate function."""
    agent: float = Field(default=600.0, gt=0)
    """For one attempt of an agent at an episode; then it is ended, and the attempt has failed."""
    call: float = Field(default=60.0, gt=0)
    """For each call of the reward function, of an environment (reset, step, reward, close), and each request by
    context.http of an own function, unless that names another timeout; a later answer is a failure of its sample. For a
    reward it stands still while a model that the function may ask has no engine that serves, for deadlines.engines at
    most."""
    sync: float = Field(default=120.0, gt=0)
    """For each step of a weight sync; steps that engines and trainer share may take two or three times this. For one
    engine to join its transfer group, or to take one bucket of weights, a quarter of it; then it is out of this
    sync. One that fails after more than that is left out of syncs for ten times as long as it took, if others are
    there and it is not colocated."""
    step: float = Field(default=7200.0, gt=0)
    """For each large part of a training step: the next batch to be complete, an evaluation of all sets, one call to the
    trainer's ranks (log-probabilities, an optimizer step, a save)."""
    close: float = Field(default=120.0, gt=0)
    """For the ranks and the rollout manager to end. For an engine that was removed from the run to finish what it has;
    then its requests are aborted, and go on at others from where they were."""

    @property
    def bucket(self) -> float:
        """For one engine to join its transfer group, or to take one bucket of weights."""
        return self.sync / 4
