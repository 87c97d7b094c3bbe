"""What the client's REST calls say of training runs and their checkpoints: lists, single ones, what weights are of."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rltool.errors import UsageError
from rltool.tinker.paths import SAMPLERS, STATES, parse_path
from rltool.tinker.saved import Saved
from rltool.tinker.service import Service

Body = dict[str, Any]


def checkpoint(saved: Saved) -> Body:
    return {
        "checkpoint_id": f"{saved.path.kind}/{saved.path.name}", "time": _time(saved.time),
        "checkpoint_type": "training" if saved.path.kind == STATES else "sampler",
        "tinker_path": str(saved.path), "size_bytes": saved.size, "public": False,
        "expires_at": None if saved.expires is None else _time(saved.expires),
    }  # fmt: skip


async def checkpoints_of(service: Service, client: str, model: str) -> Body:
    """All of a model, oldest first."""
    await service.expire()
    return {"checkpoints": [checkpoint(each) for each in service.saved(service.demand_model(client, model))]}


async def all_checkpoints(service: Service, client: str, query: Mapping[str, str]) -> Body:
    """Of all models of a client, newest first, a page of them."""
    await service.expire()
    found = [each for model in service.models_of(client) for each in service.saved(model)]
    shown, cursor = page(sorted(found, key=lambda each: -each.time), query, 100)
    return {"checkpoints": [checkpoint(each) for each in shown], "cursor": cursor}


async def training_run(service: Service, client: str, model: str) -> Body:
    await service.expire()
    return _run(service, client, service.demand_model(client, model))


async def training_runs(service: Service, client: str, query: Mapping[str, str]) -> Body:
    """A client's models, newest first, a page of them."""
    await service.expire()
    shown, cursor = page(service.models_of(client)[::-1], query, 20)
    return {"training_runs": [_run(service, client, each) for each in shown], "cursor": cursor}


async def weights_info(service: Service, client: str, body: Body) -> Body:
    await service.expire()
    path = parse_path(body.get("tinker_path"))
    service.demand_checkpoint(client, path)
    lora = service.lora_of(path.model)
    info: Body = {"base_model": service.base_model, "is_lora": lora is not None}
    if lora is not None:
        info |= {"lora_rank": lora["rank"], "train_unembed": False}
        info |= {each: lora.get(each, True) for each in ("train_mlp", "train_attn")}
    return info


def _run(service: Service, client: str, model: str) -> Body:
    lora = service.lora_of(model)
    newest = {each.path.kind: checkpoint(each) for each in service.saved(model)}
    return {
        "training_run_id": model, "base_model": service.base_model, "model_owner": client, "is_lora": lora is not None,
        "lora_rank": lora["rank"] if lora else None, "last_request_time": _time(service.last_call(model)),
        "last_checkpoint": newest.get(STATES), "last_sampler_checkpoint": newest.get(SAMPLERS),
    }  # fmt: skip


def page(found: list[Any], query: Mapping[str, str], default: int) -> tuple[list[Any], Body]:
    """The part that the query's limit (default) and offset name, and the cursor that says so. UsageError."""
    try:
        limit, offset = int(query.get("limit", default)), int(query.get("offset", 0))
    except ValueError as error:
        raise UsageError(f"limit and offset have to be integers: {error}") from error
    if limit < 1 or offset < 0:
        raise UsageError(f"limit is {limit} and offset {offset}, expected at least 1 and 0")
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
