"""Calls of several clients on one trainer: accepted, ordered, carried out, and the same again after a kill.

Each model's calls run in the order in which they were accepted; between clients they take turns. After a restart the
state is that of the last snapshot and of the calls after it, carried out again in the order in which they were before:
a model that trains all weights can be made because another was unloaded. What a restart does not need goes with a
snapshot (`Service._compact`). A model whose session is idle (`Limits.session_timeout`) is evicted where another needs
its place.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import secrets
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rltool.engines.run_client import CallCounts
from rltool.errors import DiskFull, RltoolError, RunFault, UsageError
from rltool.processes.files import saving, write_json_atomic
from rltool.processes.tasks import Background, beside
from rltool.tinker.books import BOOKKEEPING, LEFT, SAVES, Books, check_digits, makes_a_model
from rltool.tinker.calls import adam_params, adapter_spec, perform, trains_all
from rltool.tinker.journal import Call, History
from rltool.tinker.limits import (
    NO_SEQ,
    KeptResults,
    Limits,
    Queued,
    Refused,
    demand_rank,
    follow,
    integer,
    no_room,
    size_of,
    ttl,
)
from rltool.tinker.paths import SAMPLERS, SHARED, STATES, CheckpointPath, checkpoint_name, parse_path, unnamed
from rltool.training.served import ServedTrainer

_CHANGES = ("create_model", "optim_step", "load_weights", "unload_model")
"""Calls after which the ranks' weights may be others."""

_NO_ACTIVITY = ("delete_checkpoint", "checkpoint_ttl", "unload_model", "finish_session")
"""Calls that are no activity of a session: the server's own, or those of any process with the client's key."""

T = TypeVar("T")

FULL_SECONDS = 1.0
"""Between two attempts to write a result that the disk did not take."""
FETCHED_SECONDS = 600.0
"""A result is kept so long after it was given out first: the answer may have been lost on its way."""
RESULTS = 4
"""Times Limits.in_flight: of each client the newest calls, whose results are kept until they are fetched."""
_IDLE = "idle"
"""In the body of the call that finished a session which was left without a model."""
IDLE_CHECK_SECONDS = 60.0
"""How often such sessions are looked for."""
STALL_CHECK_SECONDS, STALL_SECONDS = 1.0, 15.0
"""How often it is checked whether this process stalled, and the length that is a stall: it saw no client meanwhile."""

logger = logging.getLogger(__name__)


class Service(Books):
    """trainer: driven from one thread at a time. snapshot_every: so many calls, at most, are carried out again after a
    restart. shared: a directory with checkpoints for all clients."""

    def __init__(
        self, directory: Path, trainer: ServedTrainer, base_model: str, *, limits: Limits, snapshot_every: int = 100,
        shared: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(directory, limits, shared)
        self.base_model = base_model
        self._trainer, self._directory, self._snapshot_every = trainer, directory, snapshot_every
        self.queued, self.kept = Queued(limits.queued_bytes), KeptResults(limits.queued_bytes)
        self.history = History(directory)
        self._waiting: dict[str, deque[Call]] = {}
        """By client, who comes next first."""
        self._replay: deque[Call] = deque()
        """Done before this start, and not in the snapshot."""
        self._since_snapshot = 0
        self._compacted: tuple[dict[int, tuple[Call, Call | None]], set[str]] = {}, set()
        """Calls that the journal has in another form since, None: no more; what has left it whole. The books are the
        event loop's to change."""
        self._fetched: dict[int, float] = {}
        """Number of a call -> when its result was given out first."""
        self.counts: dict[str, CallCounts] = {}
        """By kind, of the calls that this process has carried out."""
        self.running = ""
        """The kind of call that the trainer carries out now."""
        self.stalled = ""
        """Why no call is carried out, for people."""
        self._failed_saves: list[Call] = []
        """That are in the books as if they had not."""
        self._unwritten: tuple[Call, dict[str, Any], float] | None = None
        """A call that was carried out and its result, which the disk has no room for. It is not given out, and no other
        call is carried out, until it is written."""
        self.fresh: Path | None = None
        """Saved weights for sampling which are those that the ranks have now; None: there are none, as far as is
        known."""
        self._jobs: deque[tuple[Callable[[], Coroutine[Any, Any, Any]], asyncio.Future[Any]]] = deque()
        self._accepting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._tasks = Background()
        self._recover()

    # -- accepting

    async def open_session(self, client: str) -> str:
        nonce = secrets.token_hex(8)
        session = nonce + check_digits(client, nonce)
        await self._accept(client, "session", session, session, {})
        self._touch(session)
        return session

    async def finish_session(self, client: str, session: str, reason: object) -> None:
        """It makes nothing more, its models are unloaded, its sampling sessions end. The first reason stays."""
        if self._has_left(client, session):
            return
        self.demand_session(client, session)
        if session not in self._finished:
            await self._accept(client, "finish_session", session, f"finish:{session}", {"reason": reason})
        await self._unload_of(client, session)

    async def _unload_of(self, client: str, session: str) -> None:
        for model, held in list(self._models.items()):
            if model.startswith(f"{session}:") and not held.refused and not held.unloaded:
                await self.unload_model(client, {"model_id": model})

    def heartbeat(self, client: str, session: object) -> None:
        """410 where it is finished: then the client stops its heartbeats."""
        self._touch(self._open_session(client, session))

    async def create_model(self, client: str, body: dict[str, Any]) -> Call:
        follow(body, {"session_id", "model_seq_id", "base_model", "lora_config"})
        model = self._new_name(client, body)
        if body.get("base_model") != self.base_model:
            raise UsageError(f"base_model is {body.get('base_model')!r}; this server trains {self.base_model!r}")
        demand_rank(adapter_spec(body.get("lora_config")), self.limits.rank)
        return await self._make(client, "create_model", model, {"lora_config": body.get("lora_config")})

    async def on_model(self, client: str, kind: str, model: object, seq: object, body: dict[str, Any]) -> Call:
        seq = integer(seq, "seq_id", ": it makes a repetition known")
        if (client, key := f"{model}:{seq}") not in self._by_key:  # a repetition is answered where the model left, too
            self.demand_model(client, model)
        return await self._accept(client, kind, str(model), key, body)

    async def optim_step(self, client: str, body: dict[str, Any]) -> Call:
        if "optimizer_params" in body:
            raise UsageError(f"optimizer {body['optimizer_params'].get('type')!r} is not supported; adamw is")
        follow(body, {"model_id", "seq_id", "adam_params"})
        adam_params(body.get("adam_params") or {})
        kept = {"adam_params": body.get("adam_params") or {}}
        return await self.on_model(client, "optim_step", body.get("model_id"), body.get("seq_id"), kept)

    async def save_weights(self, client: str, body: dict[str, Any]) -> Call:
        follow(body, {"model_id", "seq_id", "path", "ttl_seconds"})
        await self.expire()
        seq = body.get("seq_id")
        kept: dict[str, Any] = {"name": checkpoint_name(body.get("path") or f"step-{seq}")}
        if body.get("ttl_seconds") is not None:
            kept["ttl_seconds"] = ttl(body["ttl_seconds"])
        return await self.on_model(client, "save_weights", body.get("model_id"), seq, kept)

    async def save_weights_for_sampler(self, client: str, body: dict[str, Any]) -> Call:
        """Without a path: for the sampling client that the call makes."""
        follow(body, {"model_id", "seq_id", "path", "sampling_session_seq_id", "kind", "ttl_seconds"})
        await self.expire()
        model, seq, kind = self.demand_model(client, body.get("model_id")), body.get("seq_id"), body.get("kind")
        if kind not in (None, "snapshot", "inflight"):
            raise UsageError(f"kind is {kind!r}, expected snapshot or inflight")
        if body.get("path"):
            kept: dict[str, Any] = {"name": checkpoint_name(body["path"])}
        else:
            session = _sampling_session(model.rpartition(":train:")[0], body.get("sampling_session_seq_id"))
            kept = {"name": unnamed(integer(seq, "seq_id")), "sampling_session": session}
            kept |= {"inflight": kind == "inflight"}
        if body.get("ttl_seconds") is not None:
            kept["ttl_seconds"] = ttl(body["ttl_seconds"])
        if self.lora_of(model) is None:
            kept["full"] = True
        return await self.on_model(client, "save_weights_for_sampler", model, seq, kept)

    async def open_sampler(self, client: str, body: dict[str, Any]) -> str:
        """A session for sampling from saved weights, or from the base model."""
        follow(body, {"session_id", "sampling_session_seq_id", "base_model", "model_path"})
        await self.expire()
        session = self._open_session(client, body.get("session_id"))
        name = _sampling_session(session, body.get("sampling_session_seq_id"))
        if body.get("base_model") not in (None, self.base_model):
            raise UsageError(f"base_model is {body['base_model']!r}; this server serves {self.base_model!r}")
        kept: dict[str, Any] = {"model": "", "name": None}
        if body.get("model_path"):
            path = parse_path(body["model_path"], SAMPLERS)
            self.demand_checkpoint(client, path)
            kept = {"model": path.model, "name": path.name}
        await self._accept(client, "sampling_session", name, name, kept)
        return name

    async def unload_model(self, client: str, body: dict[str, Any]) -> Call:
        """The trainer forgets it; its checkpoints and its weights for sampling stay."""
        follow(body, {"model_id"})
        model, key = body.get("model_id"), f"unload:{body.get('model_id')}"
        if (client, key) not in self._by_key:
            self.demand_model(client, model)
        return await self._accept(client, "unload_model", str(model), key, {})

    async def load_weights(self, client: str, body: dict[str, Any]) -> Call:
        follow(body, {"model_id", "seq_id", "session_id", "model_seq_id", "base_model", "path", "optimizer"})
        await self.expire()
        path = parse_path(body.get("path"), STATES)
        if path.model == SHARED:
            return await self._load_shared(client, path, body)
        self.demand_model(client, path.model)
        kept = {"path": body["path"], "optimizer": bool(body.get("optimizer")), "create": "session_id" in body}
        if "session_id" not in body:
            return await self.on_model(client, "load_weights", body.get("model_id"), body.get("seq_id"), kept)
        if body.get("base_model", self.base_model) != self.base_model:
            raise UsageError(f"base_model is {body['base_model']!r}; this server trains {self.base_model!r}")
        model = self._new_name(client, body)
        kept["lora_config"] = self._models[path.model].lora
        return await self._make(client, "load_weights", model, kept)

    async def _make(self, client: str, kind: str, model: str, body: dict[str, Any]) -> Call:
        return await self._accept(client, kind, model, f"create:{model}", body)

    async def _load_shared(self, client: str, path: CheckpointPath, body: dict[str, Any]) -> Call:
        """From a copy: what a restart carries out again must find what was loaded, and a run may delete its own."""
        model, seq = self.demand_model(client, body.get("model_id")), integer(body.get("seq_id"), "seq_id")
        copy = hashlib.sha256(f"{model}:{seq}".encode()).hexdigest()[:16]
        kept = {"path": body["path"], "optimizer": bool(body.get("optimizer")), "create": False, "copy": copy}
        if (client, f"{model}:{seq}") in self._by_key:  # a repetition: its copy may have gone with a snapshot
            return await self.on_model(client, "load_weights", model, seq, kept)
        async with self.checkpoints.copied(path, copy):
            return await self.on_model(client, "load_weights", model, seq, kept)

    # -- checkpoints

    async def delete_checkpoint(self, client: str, path: CheckpointPath) -> None:
        """Not listed and not loaded from here on. Files of a state go with a snapshot after which no call needs them,
        weights for sampling at once. A repetition changes nothing; the name is not given again."""
        try:
            if path.name not in self._models[self.demand_model(client, path.model)].saves[path.kind].deleted:
                self.demand_checkpoint(client, path)
                await self._delete(client, path)
        except Refused as refused:
            if refused.status != 410:  # the model has left, as all of its checkpoints were deleted
                raise

    async def set_ttl(self, client: str, path: CheckpointPath, seconds: object) -> None:
        """From now on; None: the checkpoint stays."""
        expires = None if seconds is None else time.time() + ttl(seconds)
        await self.expire()
        self.demand_checkpoint(client, path)
        body = {"kind": path.kind, "name": path.name, "expires": expires}
        await self._accept(client, "checkpoint_ttl", path.model, f"ttl:{secrets.token_hex(8)}", body)

    async def expire(self) -> None:
        """Deletes what is over its time. A call of the journal like any other, so that what was loaded before is loaded
        again after a kill; weights without a name just go. Files of a model that cannot be read are in the log, and
        hold up no other's."""
        for model, held in list(self._models.items()):
            try:
                await self.checkpoints.remove_unnamed(model, held.saves[SAMPLERS])
                expired = self.checkpoints.expired(model, held.saves) if model in self._models else []
            except OSError as error:
                logger.warning("checkpoints of %s, to see whether their time is over: %s", model, error)
                continue
            for path in expired:
                with suppress(Refused):  # it has gone, or will when there is room for the journal's line
                    await self._delete(held.client, path)

    async def _delete(self, client: str, path: CheckpointPath) -> None:
        body = {"kind": path.kind, "name": path.name}
        await self._accept(client, "delete_checkpoint", path.model, f"delete:{path}", body)
        self.checkpoints.sizes.pop(path, None)
        if path.kind == SAMPLERS:
            await self.checkpoints.remove(path)

    async def _accept(self, client: str, kind: str, model: str, key: str, body: dict[str, Any]) -> Call:
        """On the disk when this returns. A repetition gives the call that is there already. Idle models whose place a
        new one needs are evicted in the turn before it."""
        # Goes on where the client leaves: an accepted call is in the journal and in the books, or in neither.
        work = self._accept_in_turn(client, kind, model, key, body)
        return await asyncio.shield(self._tasks.start(work, f"accepting {kind}", awaited=True))

    async def _accept_in_turn(self, client: str, kind: str, model: str, key: str, body: dict[str, Any]) -> Call:
        # The client counts its sampling sessions anew in every repetition, and takes the one that it is given.
        content = {key: value for key, value in body.items() if key not in ("sampling_session", "evicted_for")}
        if kind not in _NO_ACTIVITY:
            self._touch(model)
        async with self._accepting:
            digest = await asyncio.to_thread(_digest, kind, content)
            known = self._by_key.get((client, key))
            if known is not None:
                if known.digest != digest:
                    raise UsageError(f"call {key} was a {known.kind} of other content: a seq_id is used once")
                return known
            if _seq(model, key) <= self._journal.floors.get(model, -1):
                raise UsageError(f"call {key} is too old: it or a later one was done, and its result fetched, long ago")
            evicted = self._to_evict(client) if makes_a_model(kind, body) else []
            self._within_limits(client, kind, model, body, evicted)
            self.queued.calls[client] += (size := size_of(body))  # of a sample that comes meanwhile, too
            try:
                unloads = [
                    (self._models[name].client, "unload_model", name, f"unload:{name}", _digest("unload_model", {}),
                     {"evicted_for": client}) for name in evicted
                ]  # fmt: skip
                call = await self._enter_new(*unloads, (client, kind, model, key, digest, body))
            finally:
                self.queued.calls[client] -= size
            self._leave()
        async with self._changed:
            self._changed.notify_all()
        return call

    async def _enter_new(self, *fields: tuple[str, str, str, str, str, dict[str, Any]]) -> Call:
        """All, or none (503). The last."""
        calls = [Call(self._journal.next + i, *each) for i, each in enumerate(fields)]
        try:
            await asyncio.to_thread(self._journal.accept, *calls)  # a disk, and a compaction, may take their time
        except OSError as error:
            raise no_room(self._directory, error.strerror) from error
        for call in calls:
            self._enter(call)
            if call.model in self._models:
                self._last_calls[call.model] = time.time()
        return calls[-1]

    def _enter(self, call: Call) -> bool:
        is_to_do = super()._enter(call)
        if is_to_do:
            self._waiting.setdefault(_for(call), deque()).append(call)
            self.queued.calls[_for(call)] += size_of(call.body)
        return is_to_do

    def _within_limits(
        self, client: str, kind: str, model: str, body: dict[str, Any], evicted: Sequence[str]
    ) -> None:  # fmt: skip
        # What was there when the call was checked may have left meanwhile, or have come.
        if kind == "finish_session" and body.get(_IDLE) and not self._is_left_idle(model):
            raise Refused(409, f"session {model} is in use")
        if kind in ("sampling_session", "finish_session") or makes_a_model(kind, body):
            self._open_session(client, model.partition(":")[0])
            self._refuse_gone(client, model)
        elif kind != "session":
            self.demand_model(client, model)
        if kind == "sampling_session" and body["model"]:
            self.demand_checkpoint(client, CheckpointPath(body["model"], SAMPLERS, body["name"]))
        if kind in BOOKKEEPING or kind == "unload_model":
            return
        if (held := self._models.get(model)) is not None and held.unloaded:
            raise Refused(410, self._unloaded(model, held.evicted))
        if len(self._waiting.get(client, ())) >= self.limits.in_flight:
            raise Refused(429, f"{self.limits.in_flight} calls wait already, the most that a client may have")
        self.queued.demand(client, size_of(body))
        # Not earlier: a repeated call may be of a checkpoint that is deleted by now.
        if kind == "load_weights" and "copy" not in body:
            self.demand_checkpoint(client, parse_path(body["path"], STATES))
        own = [self._models[name] for name in self.models_of(client)]
        trained = sum(not each.unloaded for each in own) - sum(self._models[name].client == client for name in evicted)
        if model not in self._models and trained >= self.limits.models:
            raise UsageError(f"there are {trained} models, the most that a client may have")
        if kind in ("save_weights", "save_weights_for_sampler") and not body.get("sampling_session"):
            path = CheckpointPath(model, STATES if kind == "save_weights" else SAMPLERS, body["name"])
            if path.name in self._models[model].saves[path.kind].names:
                raise UsageError(f"{path} is there already; a name is given once")
            if sum(len(saves.kept) for each in own for saves in each.saves.values()) >= self.limits.checkpoints:
                raise UsageError(f"there are {self.limits.checkpoints} checkpoints, the most that a client may have")


    # -- results

    async def result(self, client: str, number: int, seconds: float) -> dict[str, Any] | None:
        """None: there is none after so long. Of another client's call as of none: 404."""
        call, results = self._journal.calls.get(number), self._journal.results
        if call is None or call.client != client or call.kind in BOOKKEEPING or (
            self._is_done(call) and number not in results
        ):  # fmt: skip
            raise Refused(
                404, f"there is no request {number}, or its result is kept no more: it was fetched long ago, or "
                f"{RESULTS * self.limits.in_flight} newer ones of this client came before it was"
            )  # fmt: skip
        self._touch(call.model)
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: number in results)
        except TimeoutError:
            return None
        self._fetched.setdefault(number, time.monotonic())
        self.kept.fetch(client, number)
        return results.get(number)  # None: it was fetched long ago, and went just now

    # -- carrying out

    async def run(self) -> None:
        """Carries out calls until it is cancelled. Raises what the trainer raised, but a UsageError: its ranks are of
        no more use, and another process begins where the journal ends."""
        for session in [*self._finished]:  # a kill came before its models were unloaded
            with suppress(Refused):
                await self._unload_of(self._sessions[session], session)
        async with beside(self._watch_for_stalls()):
            await self._run()

    async def _watch_for_stalls(self) -> None:
        before = looked = self._responsive_since = time.monotonic()
        while True:
            await asyncio.sleep(STALL_CHECK_SECONDS)
            now = time.monotonic()
            if now - before > STALL_SECONDS:
                self._responsive_since = now
            before = now
            if now - looked > IDLE_CHECK_SECONDS:
                looked = now
                await self._finish_idle()

    async def _finish_idle(self) -> None:
        for session, client in list(self._sessions.items()):
            if session not in self._finished and self._is_left_idle(session):
                with suppress(Refused):  # it has come to life, or there is no room for the journal's line
                    await self._accept(client, "finish_session", session, f"finish:{session}", {_IDLE: True})

    async def _run(self) -> None:
        job_is_next = True
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: bool(self._replay or self._waiting or self._jobs or self._unwritten)
                )
            if self._jobs and (job_is_next or not (self._replay or self._waiting)):
                job_is_next = False
                await self._do(*self._jobs.popleft())
                continue
            job_is_next = True
            is_replayed = self._unwritten is None and bool(self._replay)
            if self._unwritten is not None:
                await asyncio.sleep(FULL_SECONDS)
                call, work = self._unwritten[0], asyncio.to_thread(self._finish, *self._unwritten)
            else:
                call = self._replay.popleft() if is_replayed else self._next_call()
                work = asyncio.to_thread(self._carry_out, call)
            carried_out = self._tasks.start(work, f"call {call.number}", awaited=True)
            try:
                await asyncio.shield(carried_out)
            except asyncio.CancelledError:
                await carried_out  # its thread goes on, and writes into the journal that is closed next
                raise
            if self._unwritten is not None:
                continue
            held = self._journal.calls.get(call.number)
            if held is not None and "proto" in held.body:  # the file has it for as long as a restart may need it
                self._journal.calls[call.number] = self._by_key[call.client, call.key] = replace(held, body={})
            while self._failed_saves:
                self._forget_save(self._failed_saves.pop())
            if not is_replayed:
                self.queued.calls[_for(call)] -= size_of(call.body)
                self._count_result(call)
            self._follow_compaction()
            if not self._accepting.locked():  # else it does so itself
                self._leave()
            async with self._changed:
                self._changed.notify_all()

    def _count_result(self, call: Call) -> None:
        """Lets go what is too much. In memory, and with the next snapshot on the disk; until then a restart does."""
        results = self._journal.results
        if (own := results.get(call.number)) is None:  # it was fetched, and the snapshot after it took it out
            return
        for number in self.kept.add(call.client, call.number, size_of(own)):
            if "proto" in (result := results.get(number, {})):  # the others are small
                results[number] = self.kept.let_go(self._journal.calls[number].kind, size_of(result))

    def _next_call(self) -> Call:
        client = next(iter(self._waiting))
        queue = self._waiting.pop(client)
        call = queue.popleft()
        if queue:
            self._waiting[client] = queue  # behind the others
        return call

    async def exclusively(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns or raises, done while `run` carries out no call. A fault of the ranks ends `run`."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.append((work, done))
        async with self._changed:
            self._changed.notify_all()
        return await done

    async def _do(self, work: Callable[[], Coroutine[Any, Any, Any]], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            return
        doing = self._tasks.start(work(), "work on the ranks", awaited=True)
        try:
            await asyncio.wait({doing})
        except asyncio.CancelledError:
            await asyncio.wait({doing})  # ranks and engines are in the middle of it
            raise
        error = doing.exception()
        if done.cancelled():
            pass
        elif error is None:
            done.set_result(doing.result())
        else:
            done.set_exception(error)
        if error is not None and (isinstance(error, RunFault) or not isinstance(error, RltoolError)):
            raise error

    def waiting(self) -> dict[str, int]:
        """By client, calls that the trainer has not begun."""
        return {client: len(queue) for client, queue in tuple(self._waiting.items())}

    def _carry_out(self, call: Call) -> None:
        if call.kind in SAVES and "error" in self._journal.results.get(call.number, {}):
            self._carried_out(call)  # before a restart, and the client knows that there is nothing
            return
        counts = self.counts.setdefault(call.kind, CallCounts(calls=0, failed=0, seconds=0.0, tokens=0))
        self.running, began = call.kind, time.perf_counter()
        samplers = self._directory / "samplers"
        exported = samplers / call.model / call.body["name"] if call.kind == "save_weights_for_sampler" else None
        there = exported is not None and exported.exists()
        try:
            result = perform(self._trainer, call, self._directory / "checkpoints", samplers)
            if call.kind in _CHANGES:
                self.fresh = None
            elif exported is not None and not there:
                self.fresh = exported
            counts["tokens"] += call.body.get("tokens", 0)
        except UsageError as error:
            result = {"error": str(error), "category": "user"}
            counts["failed"] += 1
            if makes_a_model(call.kind, call.body):
                self._models[call.model].refused = True
        except DiskFull as error:
            result = {"error": f"SaveFailed: {error}", "category": "server"}
            counts["failed"] += 1
        finally:
            self.running = ""
            counts["calls"] += 1
            seconds = time.perf_counter() - began
            counts["seconds"] += seconds
        if call.number not in self._journal.results:
            if call.kind in SAVES and "error" not in result:
                kind = STATES if call.kind == "save_weights" else SAMPLERS
                self.checkpoints.date(CheckpointPath(call.model, kind, call.body["name"]))
            self._finish(call, result, seconds)
        else:
            self._carried_out(call)

    def _finish(self, call: Call, result: dict[str, Any], seconds: float) -> None:
        try:
            self._journal.finish(call, result)
        except OSError as error:
            if self._unwritten is None:
                self.stalled = (
                    f"the result of a {call.kind} cannot be written to {self._directory} ({error.strerror}): calls "
                    "wait until it can"
                )
                logger.warning("%s", self.stalled)
            self._unwritten = call, result, seconds
            return
        self._unwritten, self.stalled = None, ""
        if call.kind in SAVES and "error" in result:
            self._failed_saves.append(call)
        self.history.carried_out(call, result, seconds)
        self._carried_out(call)

    def _carried_out(self, call: Call) -> None:
        self._done[call.model] = call.number
        self._since_snapshot += 1
        if self._since_snapshot >= self._snapshot_every:
            try:
                with saving("a snapshot", self._directory):
                    self._snapshot()
            except DiskFull as error:
                logger.warning("%s: after a restart more is carried out again", error)
                self._since_snapshot -= max(1, self._snapshot_every // 10)

    def _snapshot(self) -> None:
        """The pointer is written once the directory is whole; the one before it goes last."""
        snapshots = self._directory / "snapshots"
        snapshots.mkdir(mode=0o700, exist_ok=True)
        name = secrets.token_hex(8)
        try:
            self._trainer.snapshot(snapshots / name)
            write_json_atomic(self._directory / "snapshot.json", {"name": name, "done": self._done}, mode=0o600)
        except OSError:
            pointer = self._directory / "snapshot.json"
            if not pointer.exists() or name not in pointer.read_text(encoding="utf-8"):
                shutil.rmtree(snapshots / name, ignore_errors=True)
            raise
        self._since_snapshot = 0
        for other in snapshots.iterdir():
            if other.name != name:
                shutil.rmtree(other)
        after = self._after_snapshot()
        self.checkpoints.remove_deleted(after)
        self.checkpoints.remove_copies(after)
        self._compact()
        self.history.compact()

    def _after_snapshot(self) -> list[Call]:
        """Calls that it does not have."""
        return [call for call in tuple(self._journal.calls.values()) if not self._is_done(call)]

    def _compact(self) -> None:
        """Takes out of the journal what neither a restart from the last snapshot needs nor a client: data and results
        of calls that are done and were fetched, and sampling sessions of long ago."""
        left, gone = set(self._left), {session: dict(models) for session, models in tuple(self._gone.items())}
        entered, seen = self._entered, (Counter[str](), Counter[str]())  # read behind `left`
        calls = {n: call for n, call in tuple(self._journal.calls.items()) if n <= entered}
        now, most = time.monotonic(), RESULTS * self.limits.in_flight
        changed: dict[int, Call | None] = {}
        results: list[int] = []
        floors: dict[str, int] = {}
        for call in reversed(calls.values()):
            of = call.model.partition(":")[0] if call.kind == "sampling_session" else call.model
            if (of not in left) and (call.kind == "sampling_session" or call.body.get("sampling_session")):
                seen[0][call.client] += 1
            if not self._is_done(call) and call.kind not in BOOKKEEPING:
                continue
            has_result = call.kind not in BOOKKEEPING
            seen[1][call.client] += has_result
            fetched = self._fetched.get(call.number, math.inf)
            asked = has_result and now < fetched + FETCHED_SECONDS and seen[1][call.client] <= most
            if of in left or LEFT in call.body:
                if not asked or call.number not in self._journal.results:
                    changed[call.number] = None
                elif LEFT not in call.body:
                    changed[call.number] = replace(call, body={LEFT: True})
            elif not asked and not self._in_books(call, seen[0][call.client]):
                changed[call.number] = None
                if (seq := _seq(call.model, call.key)) < NO_SEQ:
                    floors[call.model] = max(seq, floors.get(call.model, -1))
            elif not asked and not makes_a_model(call.kind, call.body):
                results.append(call.number)
            elif "proto" in call.body:
                changed[call.number] = replace(call, body={})
        for name in left:
            self.checkpoints.forget(name)
        self._journal.compact(changed, results, floors, gone, left)
        self._compacted = {number: (calls[number], call) for number, call in changed.items()}, left

    def _follow_compaction(self) -> None:
        calls, left = self._compacted
        for call, kept in calls.values():
            if kept is None:
                self._forget(call)
            else:
                self._by_key[kept.client, kept.key] = kept
        for name in left:
            self._left.discard(name)
            self._done.pop(name, None)
        self._compacted = {}, set()
        for number in [each for each in self._fetched if each not in self._journal.results]:
            del self._fetched[number]
        self.kept.forget(but=self._journal.results)

    def _recover(self) -> None:
        self.checkpoints.remove_begun()
        pointer = self._directory / "snapshot.json"
        if pointer.exists():
            held = json.loads(pointer.read_text(encoding="utf-8"))
            self._trainer.restore(self._directory / "snapshots" / held["name"])
            self._done = held["done"]
        calls = self._journal.calls
        for call in calls.values():
            self._enter(call)
        # Results stand in the order in which the calls were carried out.
        done_before = (calls[number] for number in self._journal.results)
        self._replay.extend(call for call in done_before if not self._is_done(call))
        self.checkpoints.remove_deleted(self._after_snapshot())
        for number in self._journal.results:
            self._count_result(calls[number])
        self._leave()
        rank = self.limits.rank
        for name, model in self._models.items():
            if rank is not None and not model.refused and not model.unloaded and trains_all(model.lora) == bool(rank):
                what = "all weights" if rank else "an adapter"
                raise UsageError(
                    f"model {name!r} of this run trains {what}, and --lora-rank is {rank}: give it as it was, or "
                    "another --run"
                )

    def close(self) -> None:
        self._journal.close()
        self.history.close()


def _digest(kind: str, content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([kind, content], sort_keys=True).encode()).hexdigest()


def _for(call: Call) -> str:
    """The client that waits for it."""
    return call.body.get("evicted_for", call.client)


def _seq(model: str, key: str) -> int:
    """Of the key MODEL:SEQ of a call on a model; NO_SEQ for others."""
    return int(key.removeprefix(f"{model}:")) if key.startswith(f"{model}:") else NO_SEQ


def _sampling_session(session: str, seq: object) -> str:
    return f"{session}:sample:{integer(seq, 'sampling_session_seq_id')}"
