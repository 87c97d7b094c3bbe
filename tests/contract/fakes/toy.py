"""The dialect of an engine that there is not, and a server of it: it generates and is launched, and no more."""

from __future__ import annotations

import math

from aiohttp import web

from rltool.engines.dialects.protocol import Generates, Installation, Launches, Versions
from rltool.engines.types import Completion, EngineInfo, EngineLoad, GenerateRequest, HttpRequest
from tests.contract.fakes.server import FakeServer


class ToyDialect(Generates, Launches):
    name = "toy"
    label = "Toy"
    versions = Versions(oldest=(1, 0), newest=(1, 2))
    detected_by = ("/toy", "toy_version")
    temporary_in = "TMPDIR"
    installation = Installation(module="toy", packages=("toy-engine",))

    def generate(self, request: GenerateRequest) -> list[HttpRequest]:
        bodies = ({"id": name, "prompt": request.prompt_ids} for name in self.request_ids(request))
        return [HttpRequest("POST", "/sample", body | {"tokens": request.sampling.max_tokens}) for body in bodies]

    def parse_generate(self, request, replies):
        return [Completion(tuple(reply["ids"]), tuple(reply["logprobs"]), "length") for reply in replies]

    def request_ids(self, request: GenerateRequest) -> list[str]:
        return [f"{request.request_id}-{index:04d}" for index in range(request.n)]

    def abort(self, request_ids):
        return [HttpRequest("DELETE", f"/sample/{request_id}") for request_id in request_ids]

    def probe(self):
        return {"toy": HttpRequest("GET", "/toy")}

    def parse_probe(self, replies) -> EngineInfo:
        return EngineInfo(
            dialect=self.name, engine_version=replies["toy"]["toy_version"], model_id="policy", world_size=1,
            max_model_len=None, vocab_size=100, dtype="float32", weight_backend=None, weight_version=None,
            boot_id=None, plugin=False,
        )  # fmt: skip

    def health(self):
        return HttpRequest("GET", "/health")

    def load(self):
        return HttpRequest("GET", "/load")

    def parse_load(self, reply) -> EngineLoad:
        return EngineLoad(reply["running"], 0, 0.0)

    def argv(self, launch):
        return [str(launch.python), "-m", "toy", str(launch.model), f"--port={launch.port}", *launch.extra_args]

    def environment(self, launch):
        return {"TOY_GPUS": ",".join(map(str, launch.gpus))}


class FakeToy(FakeServer):
    async def handle(self, recorded) -> web.Response:
        if recorded.path == "/sample":
            ids = list(range(recorded.body["tokens"]))
            return web.json_response({"ids": ids, "logprobs": [math.log(0.5)] * len(ids)})
        answers = {"/toy": {"toy_version": "1.2.3"}, "/health": {}, "/load": {"running": 3}}
        known = recorded.path in answers or recorded.method == "DELETE"
        return web.json_response(answers.get(recorded.path), status=200 if known else 404)
