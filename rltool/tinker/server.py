"""Tinker's API over HTTP, as its client (tinker 0.38) calls it: routes, keys, bodies, errors.

A call is answered with the id of its future; `retrieve_future` waits for the result a while, and says "try again" with
408. What is not served is refused with a sentence, with a status that the client does not retry.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from rltool.algorithms.named_losses import check_loss
from rltool.engines.run_client import ServedStatus
from rltool.errors import UsageError
from rltool.processes.keys import read_key
from rltool.processes.tasks import beside
from rltool.tinker import checkpoints
from rltool.tinker.journal import Call
from rltool.tinker.limits import Refused
from rltool.tinker.paths import SAMPLERS, STATES, CheckpointPath, checkpoint_name
from rltool.tinker.samples import SAMPLE, Samples
from rltool.tinker.service import Service
from rltool.tinker.wire import decode_forward
from rltool.training.observe.live_metrics import exposition

Body = dict[str, Any]
Handler = Callable[[str, Body], Awaitable[Body]]

PREFIX = "/api/v1/"
POLL_SECONDS = 25.0
"""Of a long poll; the client gives up after 45."""

NOTE = "adapters of the output head (train_unembed) are not trained by this server; all other linear layers are"
FULL_NOTE = "this server trains all weights (rank 0), of one model at a time"


def read_keys(directory: Path) -> dict[str, str]:
    """Client -> key, of files by the clients' names. UsageError for a file that others may read, and for two clients
    of one key."""
    keys: dict[str, str] = {}
    for file in sorted(directory.iterdir()):
        if file.stat().st_mode & 0o077:
            raise UsageError(f"the key file {file} can be read by others: chmod 600 {file}")
        key = read_key(file, f"client {file.name!r}")
        if not key.startswith("tml-"):
            raise UsageError(f"the key in {file} does not begin with 'tml-', as tinker's client demands")
        if key in keys.values():
            raise UsageError(f"the key in {file} is that of another client too")
        keys[file.name] = key
    if not keys:
        raise UsageError(f"there is no key in {directory}: a client's key is a file with its name, of mode 600")
    return keys


class TinkerServer:
    """keys: client -> key. samples: None where there are no engines to sample with. watched_by: the name of the run and
    its key, the one for `/status` and `/metrics`; None: these are not served."""

    def __init__(
        self, service: Service, keys: Mapping[str, str], *, samples: Samples | None = None,
        poll_seconds: float = POLL_SECONDS, watched_by: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._service, self._keys, self._samples, self._poll_seconds = service, dict(keys), samples, poll_seconds
        self._watched_by = watched_by
        self._ending = asyncio.Event()
        """Polls are answered at once from then on, and the process that is started next is asked."""
        self.requests: Counter[str] = Counter()
        """By route, of this process, those refused too."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._service.limits.body_bytes, middlewares=[self._counting])
        app.on_shutdown.append(self._end_polls)
        posts: dict[str, Handler] = {
            "client/config": self._client_config,
            "client/dynamic_config": _always({"sample_cancel_enabled": self._samples is not None}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": _always({"status": "accepted"}),
            "create_model": self._future(self._service.create_model),
            "get_info": self._get_info,
            "optim_step": self._future(self._service.optim_step),
            "save_weights": self._future(self._service.save_weights),
            "load_weights": self._future(self._service.load_weights),
            "unload_model": self._future(self._service.unload_model),
        }
        if self._samples is not None:
            posts |= {
                "save_weights_for_sampler": self._future(self._service.save_weights_for_sampler),
                "create_sampling_session": self._create_sampling_session,
                "asample": self._sample,
                "cancel_future": self._cancel,
            }
            app.router.add_get(PREFIX + "samplers/{sampler}", self._sampler)
        for path, handler in posts.items():
            app.router.add_post(PREFIX + path, self._answering(handler))
        app.router.add_get(PREFIX + "healthz", self._health)
        app.router.add_get("/health", self._health)
        if self._watched_by is not None:
            app.router.add_get("/status", self._watched(lambda run: web.json_response(self._status())))
            app.router.add_get("/metrics", self._watched(
                lambda run: web.Response(text=exposition(run, metrics_of(self._status()), {}))))  # fmt: skip
        app.router.add_get(PREFIX + "get_server_capabilities", self._answering(self._capabilities))
        app.router.add_post(PREFIX + "forward_backward", self._forward_backward)
        app.router.add_post(PREFIX + "retrieve_future", self._retrieve)
        self._add_checkpoint_routes(app)
        self._add_session_routes(app)
        app.router.add_route("*", "/{path:.*}", self._no_route)
        return app

    def _add_session_routes(self, app: web.Application) -> None:
        service, one = self._service, PREFIX + "sessions/{session}"

        async def finish(client: str, body: Body, request: web.Request) -> Body:
            await service.finish_session(client, request.match_info["session"], body.get("reason"))
            return {}

        async def show(client: str, body: Body, request: web.Request) -> Body:
            models, samplers = service.parts_of(client, request.match_info["session"])
            return {"training_run_ids": models, "sampler_ids": samplers}

        async def list_all(client: str, body: Body, request: web.Request) -> Body:
            return {"sessions": checkpoints.page(service.sessions_of(client)[::-1], request.query, 20)[0]}

        self._add(app, "POST", one + "/finish", finish)
        self._add(app, "GET", one, show)
        self._add(app, "GET", PREFIX + "sessions", list_all)

    def _add(
        self, app: web.Application, method: str, path: str, answer: Callable[[str, Body, web.Request], Awaitable[Body]]
    ) -> None:
        async def handle(request: web.Request) -> web.Response:
            async def handler(client: str, body: Body) -> Body:
                return await answer(client, body, request)

            return await self._answer(request, handler, None)

        app.router.add_route(method, path, handle)

    def _add_checkpoint_routes(self, app: web.Application) -> None:
        service, runs = self._service, PREFIX + "training_runs"
        one, add = f"{runs}/{{model}}/checkpoints/{{kind:{STATES}|{SAMPLERS}}}/{{name}}", partial(self._add, app)

        def named(request: web.Request) -> CheckpointPath:
            found = request.match_info
            return CheckpointPath(found["model"], found["kind"], checkpoint_name(found["name"]))

        async def delete(client: str, body: Body, request: web.Request) -> Body:
            await service.delete_checkpoint(client, named(request))
            return {}

        async def set_ttl(client: str, body: Body, request: web.Request) -> Body:
            await service.set_ttl(client, named(request), body.get("ttl_seconds"))
            return {}

        add("GET", runs, lambda client, _, asked: checkpoints.training_runs(service, client, asked.query))
        add("GET", runs + "/{model}", lambda client, _, asked: checkpoints.training_run(
            service, client, asked.match_info["model"]))  # fmt: skip
        add("GET", runs + "/{model}/checkpoints", lambda client, _, asked: checkpoints.checkpoints_of(
            service, client, asked.match_info["model"]))  # fmt: skip
        add("GET", PREFIX + "checkpoints", lambda client, _, asked: checkpoints.all_checkpoints(
            service, client, asked.query))  # fmt: skip
        add("POST", PREFIX + "weights_info", lambda client, body, _: checkpoints.weights_info(service, client, body))
        add("DELETE", one, delete)
        add("PUT", one + "/ttl", set_ttl)

    # -- calls

    async def _client_config(self, client: str, body: Body) -> Body:
        # Chunks of one call in turn, so that they are added up in their order.
        return {"parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False}

    async def _create_session(self, client: str, body: Body) -> Body:
        return {
            "type": "create_session", "session_id": await self._service.open_session(client),
            "info_message": NOTE if self._service.limits.rank != 0 else FULL_NOTE,
        }  # fmt: skip

    async def _heartbeat(self, client: str, body: Body) -> Body:
        self._service.heartbeat(client, body.get("session_id"))
        return {"type": "session_heartbeat"}

    async def _capabilities(self, client: str, body: Body) -> Body:
        able = {"trainable": True, "sampleable": self._samples is not None}
        return {"supported_models": [{"model_name": self._service.base_model, **able}]}

    async def _get_info(self, client: str, body: Body) -> Body:
        model = self._service.demand_model(client, body.get("model_id"))
        lora, base = self._service.lora_of(model), self._service.base_model
        return {
            "type": "get_info", "model_id": model, "model_name": base, "is_lora": lora is not None,
            "lora_rank": lora["rank"] if lora else None, "model_data": {"model_name": base, "tokenizer_id": base},
        }  # fmt: skip

    async def _forward_backward(self, request: web.Request) -> web.Response:
        async def accept(client: str, body: Body) -> Body:
            if request.content_type != "application/x-protobuf":
                raise UsageError(f"forward_backward is {request.content_type}, expected application/x-protobuf")
            proto = await request.read()
            asked = await asyncio.to_thread(decode_forward, proto)
            for inputs in {tuple(datum.inputs) for datum in asked.data}:
                check_loss(asked.loss, inputs, asked.settings)
            tokens = sum(len(datum.tokens) for datum in asked.data)
            kept = {"proto": base64.b64encode(proto).decode(), "tokens": tokens}
            return _promise(await self._service.on_model(client, "forward_backward", asked.model, asked.seq, kept))

        return await self._answer(request, accept, {})

    async def _create_sampling_session(self, client: str, body: Body) -> Body:
        name = await self._service.open_sampler(client, body)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def _sampler(self, request: web.Request) -> web.Response:
        async def answer(client: str, body: Body) -> Body:
            name = request.match_info["sampler"]
            path = self._service.path_of(self._service.demand_sampler(client, name))
            return {"sampler_id": name, "base_model": self._service.base_model, "model_path": path}

        return await self._answer(request, answer, {})

    async def _sample(self, client: str, body: Body) -> Body:
        assert self._samples is not None, "else it has no route"
        sampler = self._service.demand_sampler(client, body.get("sampling_session_id"))
        number = self._samples.begin(client, body, partial(self._service.weights_of, sampler))
        sequences = [f"{number}-{i}" for i in range(body.get("num_samples", 1))]
        return {"request_id": number, "sample_sequence_ids": sequences}

    async def _cancel(self, client: str, body: Body) -> Body:
        assert self._samples is not None, "else it has no route"
        self._samples.cancel(client, str(body.get("request_id")))
        return {"type": "cancel_future"}

    async def _end_polls(self, app: web.Application) -> None:
        self._ending.set()

    async def _ends(self) -> None:
        await self._ending.wait()

    def _future(self, accept: Callable[[str, Body], Awaitable[Call]]) -> Handler:
        async def handler(client: str, body: Body) -> Body:
            return _promise(await accept(client, body))

        return handler

    async def _retrieve(self, request: web.Request) -> web.Response:
        async def wait(client: str, body: Body) -> Body:
            number = body.get("request_id")
            if self._samples is not None and isinstance(number, str) and number.startswith(SAMPLE):
                polled = self._samples.result(client, number, self._poll_seconds)
            elif not isinstance(number, str) or not number.isdecimal() or len(number) > 18:
                raise Refused(404, f"there is no request {str(number)[:40]!r}")
            else:
                polled = self._service.result(client, int(number), self._poll_seconds)
            async with beside(polled, self._ends()) as tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                result = tasks[0].result() if tasks[0].done() else None
            if result is None:
                raise _TryAgain
            return result

        return await self._answer(request, wait, None)

    # -- what all have

    @web.middleware
    async def _counting(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is not None:
            self.requests[f"{request.method} {resource.canonical}"] += 1
        return await handler(request)

    def _answering(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            return await self._answer(request, handler, None)

        return answer

    async def _answer(self, request: web.Request, handler: Handler, body: Body | None) -> web.Response:
        """body: None for that of the request, JSON."""
        client = ""
        try:
            client = self._client(request)
            if body is None:
                body = await _json(request)
            answer = await handler(client, body)
            if (proto := answer.get("proto")) is not None:  # text in the journal
                proto = proto if isinstance(proto, bytes) else base64.b64decode(proto)
                return web.Response(body=proto, content_type="application/x-protobuf")
            return web.json_response(answer)
        except _TryAgain:
            return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)
        except Refused as refused:
            return self._refused(client, refused.status, str(refused))
        except UsageError as error:
            return self._refused(client, 422, str(error))
        except web.HTTPRequestEntityTooLarge:
            reason = f"the request has more than {self._service.limits.body_bytes} bytes (--max-body-bytes)"
            return self._refused(client, 413, f"{reason}; send less data at a time")

    def _refused(self, client: str, status: int, reason: str) -> web.Response:
        if client:
            self._service.history.refused(client, reason)
        return _error(status, reason)

    def _client(self, request: web.Request) -> str:
        given = _bytes_of(request, "X-API-Key")
        found = [client for client, key in self._keys.items() if hmac.compare_digest(given, key.encode())]
        if not found:
            raise Refused(401, "the key (X-API-Key, TINKER_API_KEY) is none of this server's clients")
        return found[0]

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    def _watched(self, answer: Callable[[str], web.Response]) -> Callable[[web.Request], Awaitable[web.Response]]:
        assert self._watched_by is not None, "else it has no route"
        run, key = self._watched_by
        expected = f"Bearer {key}".encode()

        async def handle(request: web.Request) -> web.Response:
            if not hmac.compare_digest(_bytes_of(request, "Authorization"), expected):
                return _error(401, "the bearer key is missing or not that of the run")
            return answer(run)

        return handle

    def _status(self) -> ServedStatus:
        service = self._service
        # Copies: the trainer's thread writes them.
        calls = {kind: counts.copy() for kind, counts in tuple(service.counts.items())}
        status = ServedStatus(
            calls=calls, waiting=service.waiting(), models=service.models(), running=service.running,
            stalled=service.stalled, queued_bytes=service.queued.by_client(),
            result_bytes=dict(+service.kept.bytes),
            refused={who: found["refused"] for who, found in service.history.clients.items() if "refused" in found},
            requests=dict(self.requests),
        )  # fmt: skip
        if self._samples is not None:
            in_flight = {client: count for client, count in self._samples.in_flight.items() if count}
            status.update(
                samples=self._samples.ended, sampled_tokens=self._samples.tokens, samples_in_flight=in_flight
            )
        return status

    async def _no_route(self, request: web.Request) -> web.Response:
        async def refuse(client: str, body: Body) -> Body:
            raise Refused(404, f"{request.method} {request.path} is not served here")

        return await self._answer(request, refuse, {})


def metrics_of(status: ServedStatus) -> dict[str, float]:
    """For Prometheus; counters begin with the server's process."""
    found: dict[str, float] = {}
    for kind, counts in status.get("calls", {}).items():
        for name, value in cast(Mapping[str, float], counts).items():
            found[f"served/{'' if name == 'calls' else 'call_'}{name}_total/{kind}"] = float(value)
    for name in ("waiting", "queued_bytes", "result_bytes", "models", "samples_in_flight", "refused"):
        for client, value in cast(Mapping[str, int], status.get(name) or {}).items():
            found[f"served/{name}{'_total' if name == 'refused' else ''}/{client}"] = value
    if "samples" in status:
        found["served/samples_total"] = status["samples"]
        found["served/sampled_tokens_total"] = status.get("sampled_tokens", 0)
    return found


class _TryAgain(Exception):
    pass


def _always(body: Body) -> Handler:
    async def handler(client: str, given: Body) -> Body:
        return body

    return handler


def _bytes_of(request: web.Request, header: str) -> bytes:
    """As they were sent: what is no text is no key."""
    return request.headers.get(header, "").encode(errors="surrogateescape")


def _promise(call: Call) -> Body:
    return {"request_id": str(call.number), "model_id": call.model}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message, "detail": message}, status=status)


async def _json(request: web.Request) -> Body:
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as error:
        raise UsageError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError("the body is no JSON object")
    return body


async def serve(server: TinkerServer, service: Service, host: str, port: int) -> None:
    """Until the task is cancelled; raises what ended the trainer. Prints nothing."""
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        await service.run()
    finally:
        await runner.cleanup()
        await asyncio.to_thread(service.close)
