"""Before anything starts: do the given engines answer, are they of this model, and can they take weights?"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rltool.config.loader import Loaded
from rltool.config.serve import ENGINES
from rltool.config.train import TrainConfig
from rltool.engines.adapters import EXTRA_SLOTS, adapter_obstacle
from rltool.engines.client import EngineClient
from rltool.engines.delta.store import open_store
from rltool.engines.dialects import supported
from rltool.engines.dialects.sampling_mask import logprobs_of
from rltool.engines.dialects.table import adapts, controls, dialect
from rltool.engines.endpoints import EngineEndpoint, KeyUnreadable, ModelEndpoints, resolve
from rltool.engines.fleet.lease import leased_to_another
from rltool.engines.types import EngineInfo
from rltool.engines.weight_version import BadWeightVersion, WeightVersion
from rltool.errors import EngineError, EngineRejected, EngineTimedOut, EngineUnreachable, RltoolError, UsageError
from rltool.models.adapters import adapters_of
from rltool.models.quantized import AS_BFLOAT16, is_fp8, is_mxfp4
from rltool.models.registry import family_for, read_hf_config
from rltool.models.rope import longest_of
from rltool.rollout.serving.router_members import foreign_workers, refusal
from rltool.router.workers import list_workers
from rltool.training.checks.disaggregated import check_halves
from rltool.weights.transport import Backend, choose_for
from rltool.weights.verify.tolerances import check_tolerance, difference_limit

ARCHITECTURE_KEYS = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "tie_word_embeddings",
)  # fmt: skip
"""Keys of config.json that make two models of one shape interchangeable for a weight sync. An engine that does not
report one is not faulted for it."""


class EnginesAway(UsageError):
    """Too few of the given engines answer, and none of the others has refused: later they may."""


@dataclass(frozen=True)
class ProbedFleet:
    """Engines with their dialects filled in, and each one's probe result, by URL. absent: why those do not answer that
    a run which resumes is to go on without, and takes in when they do."""

    endpoints: ModelEndpoints
    infos: dict[str, EngineInfo]
    absent: Mapping[EngineEndpoint, str] = field(default_factory=dict)

    @property
    def takers(self) -> dict[str, EngineInfo]:
        """Probe results of the engines that take weights; the others (update_weights = false) are never synced."""
        return {e.url: self.infos[e.url] for e in self.endpoints.engines if e.takes_weights}

    @property
    def total_world_size(self) -> int:
        return sum(info.world_size for info in self.infos.values())


def resolve_endpoints(config: TrainConfig) -> ModelEndpoints:
    """The addresses of engines.external with engines.router and engines.api_key_file applied. Raises UsageError."""
    engines = config.engines
    found = _resolved(engines.external, engines.api_key_file)
    if engines.router is not None:
        found = found.model_copy(update={"data_url": engines.router.rstrip("/")})
    return found


def resolve_evaluation(config: TrainConfig, others: Collection[str]) -> ModelEndpoints:
    """The addresses of eval.engines with eval.api_key_file applied. others: URLs of engines that rollouts use. Raises
    UsageError."""
    found = _resolved(config.eval.engines, config.eval.api_key_file)
    both = [engine.url for engine in found.engines if engine.url in others]
    if both:
        raise UsageError(
            f"{', '.join(both)}: in engines.external and in eval.engines; an engine for evaluation alone holds other "
            "weights than those that rollouts are sampled from, so name it in one of them"
        )
    return found


def _resolved(addresses: Sequence[str], key_file: Path | None) -> ModelEndpoints:
    found = resolve(addresses)
    if key_file is None:
        return found
    keyed = tuple(e if e.key_file else e.model_copy(update={"key_file": key_file}) for e in found.engines)
    return found.model_copy(update={"engines": keyed})


def probe_fleet(
    endpoints: ModelEndpoints, timeout: float, *, given: str = "--rollout-external", needed: int | None = None
) -> ProbedFleet:
    """Ask every engine what it is, side by side. UsageError names each that does not answer, and the fix; it is
    EnginesAway where waiting may help.

    given: where the engines come from, for that. needed: this many are enough, those that do not answer are `absent`
    (one that answers and refuses is an error all the same); None: all."""

    async def probe_all() -> list[EngineInfo | BaseException]:
        async with EngineClient() as client:
            return await asyncio.gather(
                *(client.probe(e, timeout=timeout) for e in endpoints.engines), return_exceptions=True
            )

    results = asyncio.run(probe_all())
    found: dict[EngineEndpoint, EngineInfo] = {}
    failed: dict[EngineEndpoint, RltoolError] = {}
    for endpoint, result in zip(endpoints.engines, results, strict=True):
        if isinstance(result, EngineTimedOut):
            failed[endpoint] = result.named("deadlines.preflight")
        elif isinstance(result, (EngineError, UsageError)):
            failed[endpoint] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            found[endpoint] = result
    are_away = all(map(_may_answer_later, failed.values()))
    if failed and not (are_away and needed is not None and len(found) >= needed):
        raise (EnginesAway if are_away else UsageError)(
            f"{given}: "
            + "\n".join(f"{endpoint.url}: {error}" for endpoint, error in failed.items())
            + "\nAre they running (`rltool status`; `rltool serve-engines` starts them), is this where they listen, "
            f"and does a firewall let host {socket.gethostname()} through? A bare HOST:PORT that demands a key needs "
            "engines.api_key_file."
        )
    return ProbedFleet(
        endpoints.model_copy(update={"engines": tuple(e.probed(info) for e, info in found.items())}),
        {e.url: r for e, r in found.items()},
        {endpoint: str(error) for endpoint, error in failed.items()},
    )


def _may_answer_later(error: RltoolError) -> bool:
    """A key that is wrong or missing, or a server that is no engine, is no better when it is asked again."""
    return isinstance(error, EngineError) and not isinstance(error, (EngineRejected, KeyUnreadable))


def backends(fleet: ProbedFleet, config: TrainConfig, trainer_device: str) -> dict[str, Backend]:
    """How weights reach each engine that takes them, by URL. UsageError where one cannot be reached."""
    shared, takers = config.engines.shares_gpus, fleet.takers
    return {
        engine.url: choose_for(engine, takers[engine.url], config.weights, trainer_device, shares_gpus=shared)
        for engine in fleet.endpoints.engines
        if engine.url in takers
    }


def check_fleet(fleet: ProbedFleet, config: TrainConfig, trainer_device: str | None) -> None:
    """Compare every engine with the trainer's model, and with what weights can travel over. Raises UsageError with all
    that is wrong.

    trainer_device: cpu or cuda; None: weights are not sent (debug rollout-only)."""
    if trainer_device is not None and not fleet.takers:
        raise UsageError(
            "none of the given engines takes weights (update_weights is false in their endpoints.json), so what "
            "they sample would never be the trained model's: point --rollout-external at engines of the policy"
        )
    if trainer_device is not None and config.weights.store is not None:
        open_store(config.weights.store)  # UsageError for an address that is none, or without boto3
    if fleet.endpoints.data_url and config.algorithm.loss == "policy" and config.sampling.truncates:
        raise UsageError(
            f"sampling.top_p = {config.sampling.top_p:g} and sampling.top_k = {config.sampling.top_k} through the "
            f"router {fleet.endpoints.data_url}: it does not pass on which tokens were left to choose from; leave "
            "--router out (train then asks the engines directly), or set top_p = 1 and top_k = -1"
        )
    engines = [*fleet.endpoints.engines, *fleet.absent]
    check_halves(
        {engine.role for engine in engines}, {info.dialect for info in fleet.infos.values()},
        router=fleet.endpoints.data_url is not None,
        pause_mode=config.weights.pause_mode if trainer_device is not None else None,
    )  # fmt: skip
    check_engines(fleet, config, trainer_device)


def check_engines(fleet: ProbedFleet, config: TrainConfig, trainer_device: str | None) -> None:
    """What holds for each engine alone, so for one that joins a living run as well. Raises UsageError with all that is
    wrong. trainer_device None: weights are not sent."""
    if trainer_device is not None and config.weights.pause_mode != "auto":
        for kind in {info.dialect for info in fleet.takers.values()}:
            controls(kind).pause(config.weights.pause_mode)  # UsageError for a mode that this kind does not have
    model = model_facts(config.model.path)
    problems = [
        f"{engine.url}: {problem}"
        for engine in fleet.endpoints.engines
        for problem in engine_problems(
            engine, with_model_config(fleet.infos[engine.url]), model, config,
            trainer_device if engine.url in fleet.takers else None,
        )
    ]  # fmt: skip
    if problems:
        raise UsageError("these engines cannot serve this run:\n" + "\n".join(problems))
    dialects = {e.url: dialect(e.dialect, plugin=e.plugin) for e in fleet.endpoints.engines if e.dialect is not None}
    stock = [url for url, found in dialects.items() if not found.routable]
    if fleet.endpoints.data_url and stock:
        raise UsageError(
            f"{', '.join(stock)}: a stock {dialects[stock[0]].label} does not answer /generate, so sglang-router "
            "cannot route to it; leave --router out (train then asks the engines directly), or start the engine with "
            "`rltool serve-engines`"
        )


def check_leases(fleet: ProbedFleet, run: str | None) -> None:
    """UsageError if an engine that takes weights is leased to another run than `run` (None: one that has no id yet)."""
    leased = [(url, leased_to_another(info.lease, run)) for url, info in fleet.takers.items()]
    problems = [f"{url} {why}" for url, why in leased if why is not None]
    if problems:
        raise UsageError("another run is training with these engines:\n" + "\n".join(problems))


def with_difference_limit(loaded: Loaded[TrainConfig], fleet: ProbedFleet) -> Loaded[TrainConfig]:
    """monitor.logprob_difference_limit by what trainer and engines compute in, where it was not set."""
    config = loaded.config
    if config.monitor.logprob_difference_limit is not None:
        return loaded
    monitor = config.monitor.model_copy(update={"logprob_difference_limit": _limit(fleet, config)})
    origins = {**loaded.origins, "monitor.logprob_difference_limit": "by dtype"}
    return Loaded(config.model_copy(update={"monitor": monitor}), origins)


def describe_tolerances(fleet: ProbedFleet, config: TrainConfig) -> str:
    """What trainer and engines compute in, and how far their log-probabilities may therefore differ."""
    ours, takers = config.model.dtype, fleet.takers.values()
    checks = sorted({check_tolerance(config.weights.verify_tolerance, ours, x.dtype, x.device) for x in takers})
    theirs = ", ".join(sorted({info.dtype or "an unknown dtype" for info in takers}))
    return (
        f"log-probabilities: trainer in {ours}, engines in {theirs}; "
        f"mean difference allowed: {' or '.join(f'{check:g}' for check in checks)} in the value check, "
        f"{_limit(fleet, config):g} in a step"
    )


def _limit(fleet: ProbedFleet, config: TrainConfig) -> float:
    dtypes = [info.dtype for info in fleet.takers.values()]
    return difference_limit(config.monitor.logprob_difference_limit, config.model.dtype, dtypes)


def foreign_weights(fleet: ProbedFleet, run: str) -> list[str]:
    """A line for each engine that knows no leases and holds another run's weights."""
    lines = []
    for url, info in fleet.takers.items():
        try:
            version = WeightVersion.parse(info.weight_version or "")
        except BadWeightVersion:
            continue
        if version.run != run and not info.plugin:
            lines.append(
                f"{url} holds weights of another run, {version.run}: left over, or of a trainer that uses it now"
            )
    return lines


def check_router(fleet: ProbedFleet, config: TrainConfig, *, may_be_down: bool = False) -> None:
    """Does the router list its workers, and are these the given engines? Raises UsageError.

    Changes nothing: workers that are to be removed are removed when the run starts. may_be_down: a router that does not
    answer is left to its owner, who may be about to start it again, as in the middle of a run.
    """
    router = fleet.endpoints.data_endpoint()
    if router is None:
        return
    try:
        foreign = foreign_workers(list_workers(router), [*fleet.infos, *(engine.url for engine in fleet.absent)])
    except EngineError as error:
        if may_be_down and isinstance(error, EngineUnreachable):
            return
        raise UsageError(
            f"{error}\nThe router's list of workers is compared with the engines of the run, so that no request goes "
            "to an engine with other weights: is a sglang-router running there (`rltool router list`), and does a "
            f"firewall let host {socket.gethostname()} through? Without a router train asks the engines directly"
        ) from error
    if foreign and config.engines.foreign_workers == "refuse":
        raise UsageError(refusal(router.url, foreign))


def engine_problems(
    engine: EngineEndpoint, info: EngineInfo, model: dict[str, Any], config: TrainConfig, trainer_device: str | None
) -> Sequence[str]:
    """Everything that makes one engine unfit, as sentences; empty if it fits. Pure. trainer_device None: it is sent no
    weights."""
    too_old_or_new = supported.refusal(info.dialect, info.engine_version, newer=config.engines.newer_versions)
    if too_old_or_new is None and info.plugin:
        too_old_or_new = supported.plugin_refusal(info.plugin_protocol)
    if too_old_or_new is not None:
        return [too_old_or_new]
    problems = []
    text, model = of_text(info.model_config), of_text(model)
    for key in ARCHITECTURE_KEYS:
        if key in text and key in model and text[key] != model[key]:
            problems.append(
                f"serves another model: {key} is {text[key]}, the trainer's ({config.model.path}) is {model[key]}; "
                "point --rollout-external at engines of this model"
            )
            break
    if info.vocab_size is not None and info.vocab_size != model.get("vocab_size"):
        problems.append(
            f"has a vocabulary of {info.vocab_size}, the trainer's model one of {model.get('vocab_size')}; token ids "
            "would not mean the same"
        )
    if trainer_device is not None and is_mxfp4(info.model_config):
        problems.append(f"serves MXFP4 files, and takes no bfloat16 weights then; {AS_BFLOAT16}")
    if trainer_device is not None:
        problems += _fp8_problems(engine, info, config, trainer_device)
    longest = config.sampling.max_prompt_tokens + config.sampling.max_response_tokens
    if info.max_model_len is not None and info.max_model_len < longest:
        problems.append(
            f"takes {info.max_model_len} tokens, but sampling.max_prompt_tokens + sampling.max_response_tokens = "
            f"{longest}; restart it with --max-model-len {longest}, or lower these"
        )
    short = longest_of(model) if trainer_device is not None else None
    if short is not None and info.max_model_len is not None and info.max_model_len > short:
        problems.append(
            f"takes {info.max_model_len} tokens, and then has the long factors of longrope for every sequence; the "
            f"trainer has the short ones: restart it with --max-model-len {short}, or less"
        )
    if config.algorithm.loss == "policy" and config.sampling.truncates:
        problems.extend(_mask_problems(info, config.sampling.top_k))
    if trainer_device is not None and config.algorithm.exact and not info.exact:
        problems.append(
            "does not compute as algorithm.exact needs: start it with `rltool serve-engines --exact`"
            + (", and this release" if info.exact is None else "")
        )
    elif trainer_device is not None and config.algorithm.exact:
        inexact = supported.exact_refusal(info.dialect, info.engine_version, newer=config.engines.newer_versions)
        problems += [inexact] if inexact else []
    if trainer_device is not None:
        problems.extend(_weight_problems(engine, info, config, trainer_device))
    return problems


def _fp8_problems(
    engine: EngineEndpoint, info: EngineInfo, config: TrainConfig, trainer_device: str
) -> Sequence[str]:
    serves, is_sent = is_fp8(info.model_config), config.engines.quantization == "fp8"
    is_known = info.vocab_size is not None  # else the first sync compares values (`uncompared`)
    if is_sent and (serves or not is_known):
        shares, backend = config.engines.shares_gpus, None
        with suppress(UsageError):  # _weight_problems has it
            backend = choose_for(engine, info, config.weights, trainer_device, shares_gpus=shares)
        with suppress(UsageError):
            why = controls(info.dialect).not_sent_fp8(info, backend, sleeps=shares)
            return [] if why is None else [why]
    if is_sent and not is_known:
        return []
    if serves and not is_sent:
        return ['serves FP8 files, and takes no bfloat16 weights then: set engines.quantization = "fp8"']
    if is_sent and not serves:
        return [
            'serves no FP8, and engines.quantization = "fp8" sends it: start it with `rltool serve-engines '
            "--quantization fp8`"
        ]
    return []


def _mask_problems(info: EngineInfo, top_k: int) -> Sequence[str]:
    """Why an engine cannot return the tokens that top_p and top_k left to choose from."""
    if not dialect(info.dialect).sampling_masks:
        able = " or ".join(dialect(name).label for name in ENGINES if dialect(name).sampling_masks)
        return [
            f"is of {info.dialect}, which does not return the tokens that sampling.top_p and sampling.top_k left to "
            f"choose from; use {able} engines, or top_p = 1 and top_k = -1"
        ]
    needed, limit = logprobs_of(top_k), info.max_logprobs
    if limit is not None and 0 <= limit < needed:
        return [
            f"gives log-probabilities of {limit} tokens a place; sampling.top_k = {top_k} asks for {needed}, those "
            f"that tie with the last included: start it with --max-logprobs {needed}, or lower sampling.top_k"
        ]
    return []


def _weight_problems(
    engine: EngineEndpoint, info: EngineInfo, config: TrainConfig, trainer_device: str
) -> Sequence[str]:
    try:
        controls(info.dialect)
    except UsageError as error:
        return [str(error)]
    too_old = supported.training_refusal(info.dialect, info.engine_version, config.weights.pause_mode)
    if too_old is not None:
        return [too_old]
    if config.weights.lora_sync == "adapter":
        slots = config.rollout.max_staleness + EXTRA_SLOTS
        unfit = adapter_obstacle(info, config.lora.rank, slots)
        if unfit is None:
            unfit = _no_expert_adapters(info, config)
        if unfit is None and engine.role != "regular":
            unfit = 'is half of a pair, to which adapters are not sent: set weights.lora_sync to "merged"'
        if unfit is not None:
            return [unfit]
    try:
        choose_for(engine, info, config.weights, trainer_device, shares_gpus=config.engines.shares_gpus)
    except UsageError as error:
        return [str(error)]
    return []


def _no_expert_adapters(info: EngineInfo, config: TrainConfig) -> str | None:
    why = adapts(info.dialect, plugin=info.plugin).no_expert_adapters(info)
    if why is None:
        return None
    family = family_for(read_hf_config(config.model.path), config.model.family)
    if all(each.base.expert is None for each in adapters_of(family, config.lora.rank, config.lora.targets)):
        return None
    return (
        f"was to get adapters of experts, which lora.targets gives {family.architecture}, and {why}; or leave them "
        'out, such as with lora.targets = ["qkv", "proj"], or set weights.lora_sync to "merged"'
    )


def of_text(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, where a model sees pictures as well."""
    return config.get("text_config") or config


def model_facts(path: Path) -> dict[str, Any]:
    """config.json of the trainer's model."""
    return json.loads((path / "config.json").read_text())


def with_model_config(info: EngineInfo) -> EngineInfo:
    """What an SGLang engine does not report of its model, sizes and vocabulary, read from where it read
    the model. As it is where that is no directory of this host: then the engine alone knows."""
    if info.model_path is None:
        return info
    try:
        config = model_facts(Path(info.model_path))
    except (OSError, ValueError):
        return info
    reported = {key: value for key, value in info.model_config.items() if value is not None}
    return replace(info, model_config=config | reported, vocab_size=of_text(config).get("vocab_size"))


def uncompared(fleet: ProbedFleet) -> list[str]:
    """A line for the engines whose sizes and vocabulary were not compared with the trainer's."""
    urls = [url for url, info in fleet.infos.items() if with_model_config(info).vocab_size is None]
    if not urls:
        return []
    return [
        f"{', '.join(urls)}: sizes and vocabulary of the model were not compared, for the engine does not report them "
        "and its model is not on this host; the first weight sync compares values"
    ]


def alike_replicas(fleet: ProbedFleet) -> list[str]:
    """A line for engines whose data-parallel replicas draw the same random numbers: SGLang gives all the one
    --random-seed (managers/tp_worker.py), so that equal prompts which reach them in turn get equal samples."""
    urls = [url for url, info in fleet.infos.items() if _draws_alike(info)]
    if not urls:
        return []
    return [
        f"{', '.join(urls)}: SGLang starts all data-parallel replicas of a server with one random seed, so they may "
        "give the same samples of a prompt, which are worth one: start engines in their place (count of a group, "
        "--num-engines), which have seeds of their own, or use --enable-deterministic-inference, which takes one for "
        "each sample"
    ]


def paused_by_abort(fleet: ProbedFleet, config: TrainConfig) -> list[str]:
    """A line for the engines that weights.pause_mode = "auto" pauses otherwise than the rest, and why."""
    if config.weights.pause_mode != "auto":
        return []
    urls: dict[str, list[str]] = {}
    for engine in fleet.endpoints.engines:
        info = fleet.infos[engine.url]
        why = supported.why_abort(info.dialect, info.engine_version, engine.role) if engine.takes_weights else None
        if why is not None:
            urls.setdefault(why, []).append(engine.url)
    return [
        f"{', '.join(those)}: weight syncs cut requests in flight off, to be taken up again (weights.pause_mode = "
        f'"abort"), for {why}'
        for why, those in urls.items()
    ]


def _draws_alike(info: EngineInfo) -> bool:
    return dialect(info.dialect).replicas_share_seed and info.dp_size > 1 and not info.own_seeds


def describe_engines(fleet: ProbedFleet, config: TrainConfig) -> list[str]:
    """Lines for the log of a run and for its dry run."""
    absent = [
        f"engine {endpoint.url} does not answer: the run goes on without it, and takes it in when it does ({why})"
        for endpoint, why in fleet.absent.items()
    ]
    facts = [*uncompared(fleet), *alike_replicas(fleet), *paused_by_abort(fleet, config), *absent]
    return [f"engines: {describe_fleet(fleet)}", describe_tolerances(fleet, config), *facts]


def describe_fleet(fleet: ProbedFleet) -> str:
    kinds: dict[str, list[EngineEndpoint]] = {}
    for endpoint in fleet.endpoints.engines:
        kinds.setdefault(f"{endpoint.dialect} {fleet.infos[endpoint.url].engine_version}", []).append(endpoint)
    parts = ", ".join(f"{len(engines)} x {kind}" for kind, engines in kinds.items())
    through = f" through {fleet.endpoints.data_url}" if fleet.endpoints.data_url else ", asked directly"
    return f"{parts}; world size {fleet.total_world_size} in all{through}"
