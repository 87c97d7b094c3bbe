"""Where engines are: endpoints.json, and the addresses that a person types.

Every fleet has two kinds of address that are never mixed. `engines` is the control plane: each of these URLs receives
weights, pauses and health checks. `data_url`, where present, is the router to which generation goes.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import ValidationError

from rltool.config.base import Config
from rltool.config.serve import EngineKind
from rltool.engines.dialects.table import ROUTER
from rltool.engines.types import EngineInfo, EngineRole
from rltool.errors import EngineError, UsageError
from rltool.processes.files import write_text_atomic
from rltool.processes.keys import read_key

EXPECTED_FORM = "expected HOST:PORT, http://HOST:PORT, [IPV6]:PORT or @FILE (an endpoints.json), separated by commas"


class KeyUnreadable(EngineError):
    """The file of an engine's key holds none now, so nothing can be asked of that engine until it does again."""


class EngineEndpoint(Config):
    """One engine, as its starter described it. A dialect of None means: not known yet, ask the engine."""

    url: str
    dialect: EngineKind | None = None
    group: str = "default"
    role: EngineRole = "regular"
    """prefill and decode: of which a request needs one each (engines/fleet/disaggregation.py)."""
    bootstrap_port: int | None = None
    """Where a prefill and a decode engine meet: SGLang's of prefill engines; NIXL's side channel of each of vLLM's."""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    weight_backend: str | None = None
    plugin: bool = False
    boot_id: str | None = None
    gpus: tuple[int, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    """Of `gpus`, in their order; () where they are not known."""
    key_file: Path | None = None
    log: Path | None = None
    """Of the server, where rltool started it: on that host alone."""
    takes_weights: bool = True
    """False: never synced and never STALE. `resolve` clears it where the model has update_weights = false."""

    def read_key(self) -> str | None:
        """The bearer key, or None where the engine demands none. Raises UsageError where the file holds none."""
        if self.key_file is None:
            return None
        return read_key(self.key_file, self.url)

    def present_key(self) -> str | None:
        """The key for one request. KeyUnreadable in place of UsageError: the file was read when the run began, and may
        just be written anew, or lie on a host that does not answer for a moment."""
        try:
            return self.read_key()
        except UsageError as error:
            raise KeyUnreadable(f"{self.url} cannot be asked: {error}") from error

    def probed(self, info: EngineInfo) -> EngineEndpoint:
        """With what the probe found. The engine's own role counts: the endpoint may have come from an address alone."""
        return self.model_copy(
            update={
                "dialect": info.dialect,
                "plugin": info.plugin,
                "boot_id": info.boot_id or self.boot_id,
                "weight_backend": info.weight_backend,
                "role": info.role or self.role,
                "bootstrap_port": info.bootstrap_port or self.bootstrap_port,
            }
        )


class ModelEndpoints(Config):
    """The engines of one model. update_weights is false for a model that is never synced (a judge, a reference); ask
    each engine's takes_weights, for what `resolve` returns may be mixed."""

    update_weights: bool = True
    data_url: str | None = None
    engines: tuple[EngineEndpoint, ...] = ()

    def data_endpoint(self) -> EngineEndpoint | None:
        """The router, addressed like an engine of the SGLang dialect; None where there is none.

        It demands the key of the first engine: serve-engines makes one key for engines, router and client. plugin:
        where all engines behind it are known to be vLLM servers with rltool's plugin.
        """
        if self.data_url is None:
            return None
        key_file = next((engine.key_file for engine in self.engines if engine.key_file), None)
        plugin = bool(self.engines) and all(engine.plugin for engine in self.engines)
        return EngineEndpoint(url=self.data_url, dialect=ROUTER, plugin=plugin, key_file=key_file)


class Endpoints(Config):
    """The content of endpoints.json: model name -> its engines."""

    version: Literal[1] = 1
    models: dict[str, ModelEndpoints] = {}

    @classmethod
    def load(cls, path: Path) -> Endpoints:
        """Read `path`; relative key files count from its directory. Raises UsageError."""
        path = Path(path).absolute()
        try:
            endpoints = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UsageError(
                f"cannot read {path}: {error.strerror or error}; serve-engines writes this file"
            ) from error
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
            raise UsageError(f"{path} is not an endpoints file of this version: {problems}") from error
        return endpoints._map_key_files(lambda key_file: path.parent / key_file)

    def save(self, path: Path) -> None:
        """Replace `path` atomically; key files below its directory are written relative to it."""
        path = Path(path).absolute()

        def portable(key_file: Path) -> Path:
            return key_file.relative_to(path.parent) if key_file.is_relative_to(path.parent) else key_file

        text = json.dumps(self._map_key_files(portable).model_dump(mode="json"), indent=2) + "\n"
        write_text_atomic(path, text)

    def model_with(self, urls: Iterable[str]) -> str:
        """Name of the model to which engines of these URLs belong: that which has one of them, else `policy`, else the
        only one; a new one is called policy."""
        wanted = set(urls)
        for name, model in self.models.items():
            if wanted & {engine.url for engine in model.engines}:
                return name
        return next(iter(self.models)) if len(self.models) == 1 and "policy" not in self.models else "policy"

    def with_engines(self, model: str, engines: Sequence[EngineEndpoint], data_url: str | None) -> Endpoints:
        """These engines and this router for one model; the rest as it is."""
        entry = self.models.get(model, ModelEndpoints())
        entry = entry.model_copy(update={"engines": tuple(engines), "data_url": data_url})
        return self.model_copy(update={"models": {**self.models, model: entry}})

    def _map_key_files(self, change) -> Endpoints:
        def engine(e: EngineEndpoint) -> EngineEndpoint:
            return e.model_copy(update={"key_file": change(e.key_file)}) if e.key_file else e

        models = {
            name: model.model_copy(update={"engines": tuple(engine(e) for e in model.engines)})
            for name, model in self.models.items()
        }
        return self.model_copy(update={"models": models})


def edit_endpoints(path: Path, change: Callable[[Endpoints], Endpoints]) -> None:
    """Change an endpoints file that other processes change as well; one that is missing counts as empty.

    Raises UsageError where it cannot be read, OSError where it cannot be written.
    """
    path = Path(path).absolute()
    with path.with_name(f".{path.name}.lock").open("a") as lock:  # dies with its holder
        fcntl.flock(lock, fcntl.LOCK_EX)
        change(Endpoints.load(path) if path.exists() else Endpoints()).save(path)


@dataclass(frozen=True)
class Address:
    """What a person typed: exactly one of a URL (without a trailing slash) or an endpoints file."""

    url: str | None = None
    file: Path | None = None


def parse_address(text: str) -> tuple[Address, ...]:
    """Every address in a comma-separated `text`. Raises UsageError that quotes the part which is malformed."""
    return tuple(_parse_one(part.strip(), text) for part in text.split(","))


def _parse_one(part: str, text: str) -> Address:
    def malformed(why: str) -> UsageError:
        inside = f" in {text!r}" if part != text else ""
        return UsageError(f"malformed address {part!r}{inside}: {why}; {EXPECTED_FORM}")

    if not part:
        raise malformed("it is empty")
    if part.startswith("@"):
        if part == "@":
            raise malformed("no file after the @")
        return Address(file=Path(part[1:]).expanduser())
    if _is_path(part):
        raise malformed(f"this is a path, and a file is named with @ before it: @{part}")
    try:
        url = urlsplit(part if "://" in part else f"http://{part}")
        host, port = url.hostname, url.port
    except ValueError as error:
        raise malformed(str(error)) from error
    if url.scheme not in ("http", "https"):
        raise malformed(f"scheme {url.scheme!r} is not http or https")
    if url.username is not None or url.password is not None:
        raise malformed("keys do not belong into an address: use a key file")
    if url.path not in ("", "/") or url.query or url.fragment:
        raise malformed("nothing may follow the port")
    if not host or any(c.isspace() for c in part):
        raise malformed("there is no host" if not host else "it contains a space")
    if port is None or port == 0:
        raise malformed("there is no port")
    return Address(url=f"{url.scheme}://{_bracketed(host, malformed)}:{port}")


def files_in(texts: Iterable[str]) -> list[Path]:
    """The endpoints files among everything that was typed."""
    return [address.file for text in texts for address in parse_address(text) if address.file is not None]


def _is_path(part: str) -> bool:
    """`runs/x/endpoints.json`, `~/e`, `endpoints.json`; not `host:8000/route`, an address with too much behind it."""
    head, slash, _ = part.partition("/")
    return "://" not in part and (part.endswith(".json") or (bool(slash) and ":" not in head))


def _bracketed(host: str, malformed) -> str:
    if ":" not in host:
        return host
    try:
        return f"[{ipaddress.IPv6Address(host)}]"
    except ValueError as error:
        raise malformed(f"{host!r} is not an IPv6 address") from error


def resolve(texts: Iterable[str], model: str = "policy") -> ModelEndpoints:
    """The engines of `model` behind everything that was typed; files are read, bare URLs have an unknown dialect.

    A file that holds one model only is taken whatever the model's name. Raises UsageError: nothing typed, a file
    without that model or without engines, an engine named twice, two different routers. Engines of a file whose model
    has update_weights = false do not take weights; the result's update_weights: whether any engine does.
    """
    engines: list[EngineEndpoint] = []
    data_urls: set[str] = set()
    for address in (a for text in texts for a in parse_address(text)):
        if address.url is not None:
            engines.append(EngineEndpoint(url=address.url))
            continue
        assert address.file is not None  # an address is one or the other
        found = _model_of(Endpoints.load(address.file), address.file, model)
        engines.extend(engine if found.update_weights else _frozen(engine) for engine in found.engines)
        if found.data_url is not None:
            data_urls.add(found.data_url)
    if not engines:
        raise UsageError(f"no engine address was given; {EXPECTED_FORM}")
    urls = [engine.url for engine in engines]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise UsageError(f"these engines are named twice: {', '.join(twice)}")
    if len(data_urls) > 1:
        raise UsageError(
            f"the endpoints files name different routers: {', '.join(sorted(data_urls))}; one model has one router"
        )
    takers = any(engine.takes_weights for engine in engines)
    return ModelEndpoints(update_weights=takers, data_url=next(iter(data_urls), None), engines=tuple(engines))


def _frozen(engine: EngineEndpoint) -> EngineEndpoint:
    return engine.model_copy(update={"takes_weights": False})


def _model_of(endpoints: Endpoints, file: Path, model: str) -> ModelEndpoints:
    found = endpoints.models.get(model)
    if found is None and len(endpoints.models) == 1:
        found = next(iter(endpoints.models.values()))
    if found is None:
        raise UsageError(f"{file} has no model {model!r}, only {', '.join(sorted(endpoints.models)) or 'none'}")
    if not found.engines:
        raise UsageError(f"{file} lists no engine for model {model!r}")
    return found
