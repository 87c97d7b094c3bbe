"""Tokens a second through rltool's generation path, as a ratio to a bare aiohttp client on the same engine.

    python -m benchmarks.rollout_path --work runs/rollout-path              a small model on this machine's CPU
    python -m benchmarks.rollout_path --endpoints runs/demo/endpoints.json  an engine that runs, of any size

All prompts are sent at once, each for --n samples of exactly --tokens tokens with their log-probabilities, and the
paths take turns for --rounds rounds; the first is not counted. Paths:

    bare        aiohttp to the engine's own route, the JSON decoded and thrown away
    data plane  what a training run does without a router: DataPlane and EngineClient, to completions
    router      the same through sglang-router, where endpoints.json names one

The first engine of endpoints.json is taken, and must be the only one if there is a router. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints, resolve
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.types import GenerateRequest, SamplingParams
from rltool.rollout.serving.data_plane import DataPlane
from tests.tiny_models import write_tiny_qwen2

SECONDS = 600.0
VOCABULARY = 100
"""Token ids of the prompts lie below it: the tiny model has 120."""
RUN = "engines"

Send = Callable[[list[GenerateRequest]], Awaitable[int]]
"""Requests, all at once -> how many tokens came."""


@contextmanager
def started(work: Path) -> Iterator[Path]:
    """endpoints.json of a vLLM and a router on this machine's CPU, which end with the block."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "model").mkdir(exist_ok=True)
    model = write_tiny_qwen2(work / "model", tied=False, seed=1)
    environment = os.environ | {"RLTOOL_RUNS": str(work / "runs")}

    def rltool(*words: str) -> None:
        argv = [sys.executable, "-m", "rltool", *words, "--run", RUN]
        subprocess.run(argv, env=environment, check=True, stdout=sys.stderr)

    try:
        rltool("serve-engines", str(model), "--device", "cpu", "--max-model-len", "512", "--detach")
        rltool("router", "start", "--detach")
        yield work / "runs" / RUN / "endpoints.json"
    finally:
        rltool("stop")


def requests_of(args: argparse.Namespace) -> list[GenerateRequest]:
    draw = random.Random(0)
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    prompts = [tuple(draw.randrange(10, VOCABULARY) for _ in range(args.prompt)) for _ in range(args.prompts)]
    return [
        GenerateRequest(prompt, sampling, uuid.uuid4().hex, n=args.n, seed=number * args.n)
        for number, prompt in enumerate(prompts)
    ]


def bare(session: aiohttp.ClientSession, engine: EngineEndpoint) -> Send:
    engine_dialect = dialect(engine.dialect or "vllm")
    headers = {"Authorization": f"Bearer {key}"} if (key := engine.read_key()) else {}

    async def post(path: str, body: object) -> int:
        async with session.post(engine.url + path, json=body, headers=headers) as response:
            response.raise_for_status()
            reply = await response.json()
        samples = reply.get("choices") or [{"token_ids": reply["output_ids"]}]  # vLLM's form, SGLang's
        return sum(len(sample["token_ids"]) for sample in samples)

    async def send(requests: list[GenerateRequest]) -> int:
        sent = [http for request in requests for http in engine_dialect.generate(request)]
        return sum(await asyncio.gather(*(post(http.path, http.body) for http in sent)))

    return send


def through(plane: DataPlane) -> Send:
    async def send(requests: list[GenerateRequest]) -> int:
        groups = await asyncio.gather(*map(plane.generate, requests))
        return sum(len(sample.token_ids) for samples in groups for sample in samples)

    return send


async def paths_to(
    client: EngineClient, session: aiohttp.ClientSession, model: ModelEndpoints, prompts: int
) -> dict[str, Send]:
    info = await client.probe(model.engines[0])
    engine = model.engines[0].model_copy(update={"dialect": info.dialect, "plugin": info.plugin})
    fleet = Fleet()
    fleet.add_probed(engine, info, takes_weights=False)

    def plane(router: EngineEndpoint | None) -> DataPlane:
        engines = EngineSet(fleet, client)
        return DataPlane(engines, router=router, requests_per_engine=prompts, deadline=SECONDS)

    found = {"bare": bare(session, engine), "data plane": through(plane(None))}
    router = model.data_endpoint()
    if router is not None:
        if len(model.engines) != 1:
            raise SystemExit("behind a router there must be one engine, or the paths would not lead to the same")
        found["router"] = through(plane(router))
    return found


async def measure(args: argparse.Namespace, model: ModelEndpoints) -> dict[str, object]:
    rates: dict[str, list[float]] = {}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(SECONDS)
    async with EngineClient() as client, aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for number in range(1 + args.rounds):
            for name, send in (await paths_to(client, session, model, args.prompts)).items():
                began = time.perf_counter()
                tokens = await send(requests_of(args))
                if tokens != args.prompts * args.n * args.tokens:
                    raise SystemExit(f"{name}: {tokens} tokens came")
                if number:
                    rates.setdefault(name, []).append(tokens / (time.perf_counter() - began))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ratios = {
        name: [mine / other for mine, other in zip(found, rates["bare"], strict=True)] for name, found in rates.items()
    }
    return {
        "samples": args.prompts * args.n,
        "tokens_per_second": {name: round(median) for name, median in medians.items()},
        "of_bare": {name: round(statistics.median(found), 3) for name, found in ratios.items() if name != "bare"},
        "of_bare_range": {n: [round(min(r), 3), round(max(r), 3)] for n, r in ratios.items() if n != "bare"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--work", type=Path, help="directory for a small model and its engine, which are started")
    where.add_argument("--endpoints", type=Path, help="endpoints.json of an engine that runs")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    if args.endpoints is not None:
        result = asyncio.run(measure(args, resolve([f"@{args.endpoints}"])))
    else:
        with started(args.work.resolve()) as endpoints:
            result = asyncio.run(measure(args, resolve([f"@{endpoints}"])))
    print(json.dumps(result | {"load_before": round(load, 2), "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
