"""Adapters (LoRA) that the trainer has sent to a vLLM server.

POST /rltool/publish_adapter: what was fetched is an adapter (LoRA) of this name from now on, which requests give as
their model; POST /rltool/drop_adapter: its place is free again. Nothing is paused. vLLM's own /v1/load_lora_adapter
reads a directory, and its unloading leaves the workers to put out whichever adapter was used least lately: one of ours,
which has no directory to be read from again, would be lost. So a name is refused where all places are taken, and one
that requests run with is not dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rltool.engines.plugin.loading import WeightUpdateError
from rltool.engines.plugin.prefetch import Buckets
from rltool.engines.plugin.workers import ask_workers, failure_in
from rltool.engines.transfer import wire

PUBLISH_PATH = "/rltool/publish_adapter"
DROP_PATH = "/rltool/drop_adapter"
PLACEHOLDER_ID = 1
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""Of a layer or an expert."""


async def publish_adapter(state: Any, body: Any) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of POST PUBLISH_PATH {"name", "version", "peft"}: peft is adapter_config.json. 409 where the name
    or all places are taken, 500 with the reason where a worker cannot take it."""
    if not isinstance(body, Mapping) or not all(isinstance(body.get(key), str) for key in ("name", "version")):
        return 400, {"error": f"POST {PUBLISH_PATH}: 'name' and 'version' must be texts"}
    from vllm.lora.request import LoRARequest

    name, version, config = body["name"], body["version"], state.vllm_config.lora_config
    models = state.openai_serving_models
    if config is None:
        return 409, {"error": "adapters are not enabled: start the server with --enable-lora"}
    async with models.lora_resolver_lock[name]:
        if name in models.lora_requests or models.is_base_model(name):
            return 409, {"error": f"{name} is taken: a name stands for one adapter for ever"}
        if len(models.lora_requests) >= (config.max_cpu_loras or config.max_loras):
            return 409, {"error": f"all places are taken, by {', '.join(sorted(models.lora_requests))}"}
        # The path is what vLLM would read it from: nothing does, and nothing lies there.
        request = LoRARequest(name, models.lora_id_counter.inc(1), f"{version} as it was sent")
        try:
            asked = ("rltool_take_adapter", version, request.lora_int_id, body.get("peft"))
            failure = failure_in(await ask_workers(state.engine_client, *asked))
        except Exception as error:  # its text is for the trainer
            failure = f"{type(error).__name__}: {error}"
        if failure:
            return 500, {"error": failure}
        models.lora_requests[name] = request
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


def build(manager: Any, buckets: Buckets, peft: Mapping[str, Any]) -> Any:
    """vLLM's LoRAModel, still without an id. Nothing that generation uses is touched, so any thread may do it.

    manager: vLLM's WorkerLoRAManager; buckets: [bytes] uint8 each. WeightUpdateError where the model has no use for a
    tensor: vLLM ignores those that are given to it in memory, and would sample as if there were no such adapter."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    adapters, config = manager._adapter_manager, manager.lora_config
    helper = PEFTHelper.from_dict(dict(peft))
    helper.validate_legal(config)
    # Copies: vLLM multiplies B with alpha / rank in place, and what it is given is sent, or patched, again.
    tensors = {
        name: part.to(config.lora_dtype, copy=True) for bucket, flat in buckets
        for name, part in wire.split_flat(flat, bucket)
    }  # fmt: skip
    model = adapters.model
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        PLACEHOLDER_ID, tensors, helper, device="cpu", dtype=config.lora_dtype, model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        skip_prefixes=getattr(model, "lora_skip_prefixes", None),
    )  # fmt: skip
    unused = _unused(adapters, lora.loras)
    if unused:
        raise WeightUpdateError(f"the model of this engine has no adapter for {', '.join(unused[:3])}")
    adapters._validate_moe_lora_format(lora)
    return lora


def take(manager: Any, lora: Any, lora_id: int) -> None:
    """Put what `build` made among a worker's adapters: between two of the engine's steps."""
    lora.id = lora_id
    manager._adapter_manager.add_adapter(lora)
    manager._adapter_manager.activate_adapter(lora_id)


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
