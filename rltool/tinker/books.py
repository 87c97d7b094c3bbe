"""What there is: sessions, models, sampling sessions, by the calls in the journal; and what is there no more.

A finished session, and a model that is unloaded and has no checkpoint, leave all tables; their names are refused for
ever (410): a session's has check digits, a model's is kept as long as its session.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltool.tinker.calls import trains_all
from rltool.tinker.journal import Call, Journal
from rltool.tinker.limits import Limits, Refused, integer
from rltool.tinker.paths import SAMPLERS, STATES, CheckpointPath
from rltool.tinker.saved import Checkpoints, Saved, Saves

BOOKKEEPING = ("session", "sampling_session", "delete_checkpoint", "checkpoint_ttl", "finish_session")
"""Calls that the trainer has no part in: they are done when they are accepted."""
SAVES = ("save_weights", "save_weights_for_sampler")
_OF_THE_TRAINER = ("forward_backward", "optim_step", "load_weights")
"""Calls that only the trainer's state knows of: a snapshot has what they did."""
LEFT = "gone"
"""In the body of a call whose model has left the tables, and whose result is kept yet; it has nothing else."""
GONE = "these weights are gone: of saves without a name the newest are kept; save again"
KEPT_SAMPLERS = 1024
"""Of each client, the newest sampling sessions."""
IDLE_SESSION_SECONDS = 86400.0
"""A session without a model that is loaded is finished after so long without a request or heartbeat."""


@dataclass
class _Model:
    """lora: the client's lora_config. saves: by kind, STATES and SAMPLERS. inflight: calls that published weights for
    all of its sampling clients of this kind, and the names of these. refused: by the trainer, when it was to be made;
    it is neither listed nor counted. unloaded: its trainer has forgotten it, and its checkpoints stay; evicted: for
    another, as its session was idle. last: the number of its last call."""

    client: str
    lora: dict[str, Any] | None
    saves: dict[str, Saves] = field(default_factory=lambda: {STATES: Saves(), SAMPLERS: Saves()})
    inflight: list[tuple[int, str]] = field(default_factory=list)
    refused: bool = False
    unloaded: bool = False
    evicted: bool = False
    last: int = -1


@dataclass(frozen=True)
class Sampler:
    """A sampling client's session. model: whose weights, "": the base model's; name: of the saved weights, None: of
    those that were saved last for all (inflight)."""

    client: str
    model: str = ""
    name: str | None = None


class Books:
    """Of the journal in `directory`. shared: a directory with checkpoints for all clients. Owned by one event loop."""

    def __init__(self, directory: Path, limits: Limits, shared: Path | None) -> None:
        self.limits = limits
        self.checkpoints = Checkpoints(directory, shared)
        self._journal = Journal(directory)
        self._models: dict[str, _Model] = {}
        self._sessions: dict[str, str] = {}
        self._finished: set[str] = set()
        self._gone = self._journal.gone
        """Of sessions, by the numbers of their models that left: whether it was evicted."""
        self._left: set[str] = set()
        """Models and sessions that left the tables, and not the journal."""
        self._samplers: dict[str, Sampler] = {}
        self._by_key: dict[tuple[str, str], Call] = {}
        self._done: dict[str, int] = {}
        """Model -> the last call that the trainer's state has."""
        self._entered = -1
        """The last call that is in the books."""
        self._last_calls: dict[str, float] = {}
        self._last_seen: dict[str, float] = {}
        """Session -> when it last sent a request or a heartbeat."""
        self._responsive_since = time.monotonic()
        """Since this process stalled last."""
        self._started = time.time()

    def _touch(self, name: str) -> None:
        """Activity of the session of a model or sampling session, or of one itself."""
        if (session := name.partition(":")[0]) in self._sessions:
            self._last_seen[session] = time.monotonic()

    def sessions_of(self, client: str) -> list[str]:
        """In the order in which they were opened."""
        return [session for session, whose in self._sessions.items() if whose == client]

    def parts_of(self, client: str, session: str) -> tuple[list[str], list[str]]:
        """Its models and its sampling sessions."""
        self.demand_session(client, session)
        models = [name for name in self.models_of(client) if name.startswith(f"{session}:")]
        return models, [name for name in self._samplers if name.startswith(f"{session}:")]

    def demand_session(self, client: str, session: object) -> str:
        """404; 410 for one that was this client's."""
        if isinstance(session, str) and self._sessions.get(session) == client:
            return session
        if self._has_left(client, session):
            raise Refused(410, finished(session))
        raise Refused(404, f"there is no session {session!r}")

    def _has_left(self, client: str, session: object) -> bool:
        """Whether it was a session of this client's, and is none any more."""
        if not isinstance(session, str) or session in self._sessions or len(session) != 24:
            return False
        return session[16:] == check_digits(client, session[:16])

    def _open_session(self, client: str, session: object) -> str:
        found = self.demand_session(client, session)
        if found in self._finished:
            raise Refused(410, finished(found))
        return found

    def _new_name(self, client: str, body: dict[str, Any]) -> str:
        seq = integer(body.get("model_seq_id"), "model_seq_id")
        return f"{self._open_session(client, body.get('session_id'))}:train:{seq}"

    def models(self) -> dict[str, int]:
        """By client."""
        held = tuple(self._models.values())
        return dict(Counter(each.client for each in held if not each.refused and not each.unloaded))

    def models_of(self, client: str) -> list[str]:
        """In the order in which they were made."""
        return [name for name, each in self._models.items() if each.client == client and not each.refused]

    def last_call(self, model: str) -> float:
        """When it was accepted, in seconds of the clock; after a restart without a call since, when that was."""
        return self._last_calls.get(model, self._started)

    def demand_model(self, client: str, model: object) -> str:
        """Of another client's as of none: 404; 410 for one that has left."""
        if isinstance(model, str) and model in self._models and self._models[model].client == client:
            return model
        self._refuse_gone(client, model)
        raise Refused(404, f"there is no model {model!r}")

    def _refuse_gone(self, client: str, model: object) -> None:
        session, _, number = str(model).partition(":train:")
        if self._has_left(client, session):
            raise Refused(410, f"model {model!r} is unloaded: {finished(session)}")
        if self._sessions.get(session) == client and number in self._gone.get(session, ()):
            raise Refused(410, self._unloaded(str(model), self._gone[session][number]))

    def _unloaded(self, model: str, evicted: bool) -> str:
        why = f" (evicted: its session was idle for {self.limits.session_timeout:g} s)" if evicted else ""
        return f"model {model!r} is unloaded{why}; make another, of one of its checkpoints where it has any"

    def lora_of(self, model: str) -> dict[str, Any] | None:
        """None: all weights are trained."""
        lora = self._models[model].lora
        return None if trains_all(lora) else lora

    def demand_checkpoint(self, client: str, path: CheckpointPath) -> None:
        """404 for one that is deleted, not saved yet, or another client's."""
        self.checkpoints.demand(path, self._models[self.demand_model(client, path.model)].saves[path.kind])

    def saved(self, model: str) -> list[Saved]:
        """A model's checkpoints and its named weights for sampling, oldest first."""
        return self.checkpoints.of(model, self._models[model].saves)

    def demand_sampler(self, client: str, session: object) -> Sampler:
        """Of another client's as of none: 404."""
        found = self._samplers.get(session) if isinstance(session, str) else None
        if found is None or found.client != client:
            self._open_session(client, str(session).partition(":")[0])
            raise Refused(404, f"there is no sampling session {session!r}")
        self._touch(str(session))
        return found

    def path_of(self, sampler: Sampler) -> str | None:
        """tinker:// path of weights that have a name; None: the base model, or weights of one sampling client."""
        path = CheckpointPath(sampler.model, SAMPLERS, sampler.name or "")
        return None if sampler.name is None or path.is_unnamed else str(path)

    def weights_of(self, sampler: Sampler) -> Path | None:
        """Where the adapter, or all weights, are that a request is sampled with now; None: the base model's."""
        if not sampler.model:
            return None
        name = sampler.name
        if name is None:
            results = self._journal.results
            done = self._done.get(sampler.model, -1)
            inflight = self._models[sampler.model].inflight
            saved = [each for number, each in inflight if number in results or number <= done]
            name = saved[-1] if saved else ""
        directory = self.checkpoints.at(CheckpointPath(sampler.model, SAMPLERS, name))
        if not name or name in self._models[sampler.model].saves[SAMPLERS].deleted or not directory.exists():
            raise Refused(404, GONE)
        return directory

    def _to_evict(self, client: str) -> list[str]:
        """Idle models, those that were seen last last: of all clients where one model alone can be, else as many as
        this client has too many."""
        full = self.limits.rank == 0
        held = [
            name for name, each in self._models.items()
            if not each.refused and not each.unloaded and (full or each.client == client)
        ]  # fmt: skip
        idle = sorted(filter(self._is_idle, held), key=self._seen)
        needed = len(idle) if full else len(held) + 1 - self.limits.models
        return idle[:needed] if 0 < needed <= len(idle) else []

    def _seen(self, name: str) -> float:
        return max(self._last_seen.get(name.partition(":")[0], 0.0), self._responsive_since)

    def _is_idle(self, name: str) -> bool:
        """Nothing of its session for so long, and no call that is not done."""
        is_done = self._models[name].last <= self._done.get(name, -1)
        return is_done and time.monotonic() - self._seen(name) > self.limits.session_timeout

    def _is_left_idle(self, session: str) -> bool:
        if time.monotonic() - self._seen(session) <= IDLE_SESSION_SECONDS:
            return False
        return all(self._is_over(name) for name in self._models if name.startswith(f"{session}:"))

    def _is_over(self, name: str) -> bool:
        """Whether the trainer has it no more, or never had it."""
        model = self._models[name]
        return (model.unloaded or model.refused) and model.last <= self._done.get(name, -1)

    def _is_done(self, call: Call) -> bool:
        """Whether the trainer's state has it."""
        return LEFT in call.body or call.number <= self._done.get(call.model, -1)

    def _enter(self, call: Call) -> bool:
        """An accepted call into the books. Whether the trainer is yet to carry it out."""
        self._by_key[call.client, call.key] = call
        self._entered = call.number
        if LEFT in call.body:
            return False
        if call.kind == "session":
            self._sessions[call.model] = call.client
            return False
        if call.kind == "finish_session":
            self._finished.add(call.model)
            for sampler in [name for name in self._samplers if name.startswith(f"{call.model}:")]:
                del self._samplers[sampler]
            return False
        if call.kind == "sampling_session":
            self._samplers[call.model] = Sampler(call.client, call.body["model"], call.body["name"])
            return False
        if call.kind == "delete_checkpoint":
            self._models[call.model].saves[call.body["kind"]].deleted.add(call.body["name"])
            self.checkpoints.deletions.append(call)
            return False
        if call.kind == "checkpoint_ttl":
            self._models[call.model].saves[call.body["kind"]].expires[call.body["name"]] = call.body["expires"]
            return False
        if call.kind in ("create_model", "load_weights") and call.model not in self._models:
            refused = "error" in self._journal.results.get(call.number, {})
            self._models[call.model] = _Model(call.client, call.body["lora_config"], refused=refused)
        model = self._models[call.model]
        model.last = call.number
        if call.kind in ("save_weights", "save_weights_for_sampler"):
            self._enter_save(call)
        if call.kind == "unload_model":
            model.unloaded, model.evicted = True, "evicted_for" in call.body
        return call.number > self._done.get(call.model, -1) and call.number not in self._journal.results

    def _enter_save(self, call: Call) -> None:
        if "error" in self._journal.results.get(call.number, {}):
            return
        model, name, session = self._models[call.model], call.body["name"], call.body.get("sampling_session")
        saves = model.saves[STATES if call.kind == "save_weights" else SAMPLERS]
        if "ttl_seconds" in call.body:
            saves.ttl[name] = call.body["ttl_seconds"]
        if session is None:
            saves.names.add(name)
        elif call.body["inflight"]:
            model.inflight.append((call.number, name))
            self._samplers[session] = Sampler(call.client, call.model)
        else:
            self._samplers[session] = Sampler(call.client, call.model, name)

    def _forget_save(self, call: Call) -> None:
        """Of one that failed: its name can be given again."""
        model, name = self._models.get(call.model), call.body["name"]
        if model is None:
            return
        saves = model.saves[STATES if call.kind == "save_weights" else SAMPLERS]
        saves.names.discard(name)
        saves.ttl.pop(name, None)
        self._samplers.pop(call.body.get("sampling_session", ""), None)
        with suppress(ValueError):
            model.inflight.remove((call.number, name))

    def _leave(self) -> None:
        """What is over leaves the tables. Not while a call is being accepted: it may be about that."""
        for name, model in list(self._models.items()):
            if not self._is_over(name) or any(saves.kept for saves in model.saves.values()):
                continue
            if not any(deletion.model == name for deletion in tuple(self.checkpoints.deletions)) and not any(
                sampler.model == name for sampler in self._samplers.values()
            ):  # fmt: skip
                session, _, number = name.partition(":train:")
                if session in self._sessions:
                    self._gone.setdefault(session, {})[number] = model.evicted
                del self._models[name]
                self._last_calls.pop(name, None)
                self._left.add(name)
        for session in [*self._finished]:
            if all(self._is_over(name) for name in self._models if name.startswith(f"{session}:")):
                self._finished.discard(session)
                for table in (self._sessions, self._last_seen, self._gone):
                    table.pop(session, None)
                self._left.add(session)

    def _in_books(self, call: Call, samplers: int) -> bool:
        """Whether a call that is done is needed to know what there is. samplers: sampling sessions of its client, from
        the newest to this."""
        if call.kind == "checkpoint_ttl":
            if (model := self._models.get(call.model)) is None:  # it leaves just now
                return True
            saves, name = model.saves[call.body["kind"]], call.body["name"]
            return name not in saves.deleted and saves.expires.get(name) == call.body["expires"]
        if call.kind in SAVES and "error" in self._journal.results.get(call.number, {}):
            return False
        if call.kind == "sampling_session" or call.body.get("sampling_session"):
            return samplers <= KEPT_SAMPLERS
        return call.kind not in _OF_THE_TRAINER or makes_a_model(call.kind, call.body)

    def _forget(self, call: Call) -> None:
        self._by_key.pop((call.client, call.key), None)
        if call.kind == "sampling_session":
            self._samplers.pop(call.model, None)
        if session := call.body.get("sampling_session"):
            self._samplers.pop(session, None)
            with suppress(ValueError, KeyError):
                self._models[call.model].inflight.remove((call.number, call.body["name"]))


def check_digits(client: str, nonce: str) -> str:
    """End of the name of a session: by it a name is known as given to this client, where nothing else knows it."""
    return hashlib.sha256(f"{client}:{nonce}".encode()).hexdigest()[:8]


def finished(session: object) -> str:
    return f"session {session} is finished; open another"


def makes_a_model(kind: str, body: Mapping[str, Any]) -> bool:
    return kind == "create_model" or (kind == "load_weights" and body["create"])
