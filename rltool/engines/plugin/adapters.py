"""Adapters (LoRA) that the trainer has sent to a vLLM server.

POST /rltool/prefetch with "peft": every worker has the adapter in a free place among its stacked A and B, while the
engine generates: nothing reads a place that no adapter has. POST /rltool/publish_adapter: it has this name from now on,
which requests give as their model; no worker is asked. POST /rltool/drop_adapter: its place is free again.

Nothing is paused. vLLM's own way (load_lora_adapter, LoRAModelManager.add_adapter) takes 0.17 s for 7B at rank 32: it
pins each tensor in the host's memory twice, and scales and copies them between two steps of the engine. It also puts
out whichever adapter was used least lately where all places are taken: one of ours, which is nowhere else, would be
lost. So ours are pinned, none comes where no place is free, and one that requests run with is not dropped.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rltool.engines.plugin.loading import WeightUpdateError
from rltool.engines.plugin.prefetch import Buckets, NotFetched
from rltool.engines.plugin.worker import ask_workers, failure_in
from rltool.engines.transfer import wire
from rltool.engines.types import Bucket

logger = logging.getLogger(__name__)

PUBLISH_PATH = "/rltool/publish_adapter"
DROP_PATH = "/rltool/drop_adapter"
RESERVED = -1
"""In vLLM's table of places: no adapter has this id."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""Of a layer or an expert."""


def place_for(state: Any, body: Any) -> dict[str, Any] | None:
    """What the workers get to know of the adapter of POST /rltool/prefetch: its config, its id, and the ids that have
    names, or run on without one; None: it is about weights. state: the FastAPI app's."""
    peft = body.get("peft") if isinstance(body, Mapping) else None
    models = getattr(state, "openai_serving_models", None)
    if peft is None or models is None:
        return None
    version, ids = body.get("version"), getattr(state, "rltool_placing", {})
    lora_id = ids.get(version) or models.lora_id_counter.inc(1)  # the same, where it is asked for once more
    state.rltool_placing = {version: lora_id}
    running = [each.lora_request for each in state.engine_client.output_processor.request_states.values()]
    named = {request.lora_int_id for request in (*models.lora_requests.values(), *running) if request is not None}
    return {"peft": peft, "id": lora_id, "named": sorted(named)}


def placed(state: Any, version: str, place: Mapping[str, Any]) -> None:
    """All workers have it: `publish_adapter` finds it by its version."""
    state.rltool_placed = {version: place["id"]}


async def publish_adapter(state: Any, body: Any) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST PUBLISH_PATH {"name", "version"}. 409 where the name is taken or the version was not
    prefetched."""
    if not isinstance(body, Mapping) or not all(isinstance(body.get(key), str) for key in ("name", "version")):
        return 400, {"error": f"POST {PUBLISH_PATH}: 'name' and 'version' must be texts"}
    from vllm.lora.request import LoRARequest

    name, version, models = body["name"], body["version"], state.openai_serving_models
    if state.vllm_config.lora_config is None:
        return 409, {"error": "adapters are not enabled: start the server with --enable-lora"}
    async with models.lora_resolver_lock[name]:
        if name in models.lora_requests or models.is_base_model(name):
            return 409, {"error": f"{name} is taken: a name stands for one adapter for ever"}
        lora_id = getattr(state, "rltool_placed", {}).pop(version, None)
        if lora_id is None:
            return 409, {"error": f"adapter {version} is not here: POST /rltool/prefetch with 'peft' comes first"}
        # The path is what vLLM would read it from: nothing does, and nothing lies there.
        models.lora_requests[name] = LoRARequest(name, lora_id, f"{version} as it was sent")
        state.rltool_placing = {}
    return 200, {"name": name}


async def drop_adapter(state: Any, body: Any) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST DROP_PATH {"name"}. 409 while requests run with it; 200 where there is none of this
    name."""
    name = body.get("name") if isinstance(body, Mapping) else None
    if not isinstance(name, str) or not name:
        return 400, {"error": f"POST {DROP_PATH}: 'name' must be a non-empty text"}
    models, engine = state.openai_serving_models, state.engine_client
    async with models.lora_resolver_lock[name]:
        request = models.lora_requests.get(name)
        if request is None:
            return 200, {"name": name}
        running = engine.output_processor.request_states.values()
        if any(each.lora_name == name for each in running):
            return 409, {"error": f"requests run with {name}"}
        del models.lora_requests[name]  # first: no request may begin with it any more
        await ask_workers(engine, "rltool_drop_adapter", request.lora_int_id)
    return 200, {"name": name}


class Placing:
    """An adapter on its way into a place of a worker's. manager: vLLM's WorkerLoRAManager; place: `place_for`.

    All but the call are made on the worker's one thread. WeightUpdateError where no place is free.
    """

    def __init__(self, manager: Any, place: Mapping[str, Any]) -> None:
        self._manager, self._adapters = manager, manager._adapter_manager
        self.peft, self.lora_id = place["peft"], place["id"]
        self._lora: Any = None
        self._given_up = False
        self._filling = threading.Lock()
        places = self._adapters.lora_index_to_id
        if None not in places:
            raise WeightUpdateError(f"all {len(places)} places for adapters are taken")
        self.index = places.index(None)
        places[self.index] = RESERVED

    def __call__(self, buckets: Buckets) -> Placing:
        """Fill the place: in any thread, beside generation."""
        started = time.perf_counter()
        with _beside(self._manager.device):
            lora = build(self._manager, buckets, self.peft, self.lora_id)
            built = time.perf_counter()
            with self._filling:
                if self._given_up:
                    raise NotFetched("its place was given to another")
                fill(self._adapters, lora, self.index)
        logger.info("adapter made in %.4f s, in its place in %.4f s", built - started, time.perf_counter() - built)
        lora.loras = _Elsewhere()
        self._lora = lora
        return self

    def register(self) -> None:
        """Requests may name it, once it is filled. Idempotent."""
        adapters, lora = self._adapters, self._lora
        assert lora is not None, "the call comes first"
        if lora.id in adapters._registered_adapters:
            return
        if adapters.lora_index_to_id[self.index] != RESERVED:  # vLLM puts all out after an update of the weights
            raise WeightUpdateError("its place was taken away while it was filled")
        adapters._registered_adapters[lora.id] = lora
        adapters._active_adapters[lora.id] = None
        adapters.lora_index_to_id[self.index] = lora.id
        for cache in (adapters._registered_adapters, adapters._active_adapters):
            cache.pin(lora.id)

    def give_up(self) -> None:
        """It will not be registered: its place is free again. Idempotent, and without effect on one that is."""
        with self._filling:
            self._given_up = True
        places = self._adapters.lora_index_to_id
        if places[self.index] == RESERVED:
            places[self.index] = None


def drop_unnamed(manager: Any, named: Iterable[int]) -> None:
    """Of ours, those that were placed and never published: their trainer died between, or another worker failed. Of
    those that vLLM has loaded, where no place is free, what it keeps for a name that was taken back."""
    adapters, kept = manager._adapter_manager, {*named}
    for lora_id, lora in adapters.list_adapters().items():
        is_ours = isinstance(lora.loras, _Elsewhere)
        if lora_id not in kept and (is_ours or None not in adapters.lora_index_to_id):
            adapters.remove_adapter(lora_id)


class _Elsewhere(dict[str, Any]):
    """The tensors of an adapter that is in its place alone: vLLM would fill another with zeros, which are the model
    without an adapter."""

    def get(self, *_: Any) -> Any:
        raise WeightUpdateError("an adapter of the trainer's has lost its place, and is nowhere else")


def build(manager: Any, buckets: Buckets, peft: Mapping[str, Any], lora_id: int = 1) -> Any:
    """vLLM's LoRAModel on the worker's device, packed as its layers are and scaled. Nothing that generation uses is
    touched.

    buckets: [bytes] uint8 each. WeightUpdateError where the model has no use for a tensor: vLLM ignores those that are
    given to it in memory, and would sample as if there were no such adapter."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    adapters, config, device = manager._adapter_manager, manager.lora_config, manager.device
    helper = PEFTHelper.from_dict(dict(peft))
    helper.validate_legal(config)
    tensors = dict(part for bucket, flat in buckets for part in _copied(bucket, flat, device, config.lora_dtype))
    model = adapters.model
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    lora: Any = LoRAModel.from_lora_tensors(
        lora_id, tensors, helper, device=str(device), dtype=config.lora_dtype, model_vocab_size=manager.vocab_size,
        weights_mapper=mapper,
        skip_prefixes=getattr(model, "lora_skip_prefixes", None),
    )  # fmt: skip
    unused = _unused(adapters, lora.loras)
    if unused:
        raise WeightUpdateError(f"the model of this engine has no adapter for {', '.join(unused[:3])}")
    adapters._validate_moe_lora_format(lora)
    # Of tens of thousands where experts have some, beside generation.
    lora.rltool_names = {} if mapper is None else {_module(name, mapper): _module(name, None) for name in tensors}
    lora.rltool_shapes = _shapes(adapters, lora)
    adapters._create_merged_loras_inplace(lora)
    return lora


def fill(adapters: Any, lora: Any, index: int) -> None:
    """As LoRAModelManager.activate_adapter does it, into a place that nothing reads."""
    for name, module in adapters.modules.items():
        weights = adapters._get_lora_layer_weights(lora, name)
        if weights is None:
            module.reset_lora(index)
        else:
            module.set_lora(index, weights.lora_a, weights.lora_b)


def _copied(
    bucket: Bucket, flat: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies: vLLM multiplies B with alpha / rank in place, and what it is given is sent, or patched, again. One
    conversion for a bucket, not for each of hundreds of small tensors."""
    kinds = {meta.dtype for meta in bucket}
    if len(kinds) != 1:
        yield from ((name, part.to(device, dtype, copy=True)) for name, part in wire.split_flat(flat, bucket))
        return
    whole, start = flat.to(device).view(wire.dtype_of(kinds.pop())).to(dtype, copy=True), 0
    for meta in bucket:
        end = start + math.prod(meta.shape)
        yield meta.name, whole[start:end].view(meta.shape)
        start = end


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On a stream of its own, where there are streams; what was begun is done at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which the buckets may still be copied on
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    stream.synchronize()


def digests(manager: Any, lora_id: int) -> dict[str, str]:
    """SHA-256 of each A and B that a worker samples with under an adapter, B scaled, by the module's name in peft and
    the letter: model.layers.0.self_attn.q_proj.lora_A. Not of those of which this worker has a part (tensor
    parallelism)."""
    adapters, found = manager._adapter_manager, dict[str, str]()
    lora = adapters.get_adapter(lora_id)
    if lora is None or lora_id not in adapters.lora_index_to_id:
        raise WeightUpdateError(f"this worker has no adapter {lora_id}")
    index, names = adapters.lora_index_to_id.index(lora_id), getattr(lora, "rltool_names", {})
    shapes = getattr(lora, "rltool_shapes", None) or _shapes(adapters, lora)
    for module, layer in adapters.modules.items():
        parts = adapters.packed_modules.get(module, [module])
        for number, part in enumerate(parts):
            for letter, shape in zip("AB", shapes.get(part, ()), strict=False):
                stacked = layer.lora_a_stacked if letter == "A" else layer.lora_b_stacked
                if stacked[0].dim() == 2:  # of experts: one of each place and product, those of a place together
                    if len(stacked) != len(parts) * len(adapters.lora_index_to_id):  # it has some of the experts
                        continue
                    held = stacked[index * len(parts) + number]
                elif len(stacked) == len(parts):
                    held = stacked[number][index, 0]
                else:
                    continue
                if held.shape[0] >= shape[0] and held.shape[1] >= shape[1]:
                    raw = held[: shape[0], : shape[1]].cpu().contiguous().flatten().view(torch.uint8).numpy()
                    found[f"{names.get(part, part)}.lora_{letter}"] = hashlib.sha256(raw.data).hexdigest()
    return found


def experts_output(
    context: Any, x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor],
    chosen: tuple[torch.Tensor, torch.Tensor], activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """[tokens, hidden] in float32, of experts in plain torch, each token with the adapter of its place.

    context: vLLM's MoELoRAContext, None where no adapters are; x: [tokens, hidden]; weights: [experts, 2 x inner,
    hidden] with gates first, and [experts, hidden, inner]; chosen: shares and numbers of experts, [tokens, k] each;
    activate: [rows, 2 x inner] -> [rows, inner]."""
    (w13, w2), (shares, numbers) = weights, chosen
    places = torch.full((len(x),), -1)
    if context is not None:
        known = context.punica_wrapper.token_lora_indices
        places[: len(known)] = known[: len(places)]
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for expert in numbers.unique().tolist():
        rows, choices = (numbers == expert).nonzero(as_tuple=True)
        both, held = x[rows] @ w13[expert].T, places[rows]
        if context is not None:
            pairs = zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)
            both = both + torch.cat([_added(x[rows], held, expert, a, b) for a, b in pairs], dim=-1)
        inner = activate(both)
        y = inner @ w2[expert].T
        if context is not None:
            y = y + _added(inner, held, expert, context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0])
        total.index_add_(0, rows, y.float() * shares[rows, choices, None].float())
    return total


def _added(x: torch.Tensor, places: torch.Tensor, expert: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """B A x of each row's place, zero where that is -1. x: [rows, inputs]; a: [places, experts, rank, inputs]; b:
    [places, experts, outputs, rank], scaled."""
    found = x.new_zeros(len(x), b.shape[2])
    for place in places.unique().tolist():
        if place >= 0:
            rows = places == place
            found[rows] = x[rows] @ a[place, expert].T @ b[place, expert].T
    return found


def _shapes(adapters: Any, lora: Any) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Of A and B of each product."""
    found = dict[str, tuple[torch.Size, torch.Size]]()
    for module, layer in lora.loras.items():
        packed = isinstance(layer.lora_a, list)
        parts = adapters.packed_modules[module] if packed else [module]
        pairs = zip(layer.lora_a, layer.lora_b, strict=True) if packed else [(layer.lora_a, layer.lora_b)]
        for part, (a, b) in zip(parts, pairs, strict=False):
            if a is not None and b is not None:
                found[part] = (a.shape, b.shape)
    return found


async def checksums(state: Any, name: str) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of GET /rltool/checksums?adapter=NAME: `digests` of each worker. 404 without such an adapter."""
    request = state.openai_serving_models.lora_requests.get(name)
    if request is None:
        return 404, {"error": f"there is no adapter {name}"}
    answers = await ask_workers(state.engine_client, "rltool_adapter_digests", request.lora_int_id)
    if failure := failure_in([failure for _, failure in answers]):
        return 500, {"error": failure}
    named = {f"worker{i}:{name}": value for i, (found, _) in enumerate(answers) for name, value in found.items()}
    return 200, {"checksums": named}


def _module(name: str, mapper: Any) -> str:
    from vllm.lora.utils import parse_fine_tuned_lora_name

    return parse_fine_tuned_lora_name(name, mapper)[0]


def _unused(adapters: Any, names: Iterable[str]) -> list[str]:
    """Modules that no layer of this worker takes an adapter for: layers of another pipeline stage are let pass, by what
    the same place of other layers takes."""
    from vllm.model_executor.models.utils import PPMissingLayer

    known = {*adapters.modules} - {*adapters.packed_modules}
    known |= {part for parts in adapters.packed_modules.values() for part in parts}
    unused = sorted({*names} - known)
    if any(isinstance(module, PPMissingLayer) for module in adapters.model.modules()):
        places = {NUMBER.sub("*", name) for name in known}
        unused = [name for name in unused if NUMBER.sub("*", name) not in places]
    return unused
