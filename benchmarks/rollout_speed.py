"""Tokens a second of vLLM engines through rltool's client, and through a bare one that only reads the replies.

    python -m benchmarks.rollout_speed --url http://127.0.0.1:8000 --key-file key --samples 512 --tokens 512

The engines must run already and have one key; a model of random weights will do, and requests take turns with them.
Every sample is a request of its own (--n 1) or one of
n of a prompt, all are sent at once, and each has exactly --tokens tokens with their log-probabilities. Routes: bare
(vLLM's own, JSON decoded and thrown away), own (the same, made into samples), arrays (the plugin's). Prints one line
of JSON for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
import uuid
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp

from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import GenerateRequest, SamplingParams

TIMEOUT = 600.0


def requests_of(args: argparse.Namespace) -> list[GenerateRequest]:
    draw = random.Random(0)
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    return [
        GenerateRequest(
            tuple(draw.randrange(100, 1000) for _ in range(args.prompt)),
            sampling,
            uuid.uuid4().hex,
            n=args.n,
            seed=number * args.n,
        )
        for number in range(args.samples // args.n)
    ]


async def bare(args: argparse.Namespace, requests: list[GenerateRequest]) -> int:
    headers = {"Authorization": f"Bearer {args.key_file.read_text().strip()}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(TIMEOUT)
    ) as session:

        async def one(url: str, request: GenerateRequest) -> int:
            (sent,) = dialect("vllm").generate(request)
            if args.no_logprobs:
                del sent.body["sampling_params"]["logprobs"]
            async with session.post(url + sent.path, json=sent.body) as response:
                response.raise_for_status()
                reply = await response.json()
            return sum(len(choice["token_ids"]) for choice in reply["choices"])

        return sum(await asyncio.gather(*map(one, cycle(args.url), requests)))


async def through_client(args: argparse.Namespace, requests: list[GenerateRequest], *, plugin: bool) -> int:
    engines = [EngineEndpoint(url=url, dialect="vllm", key_file=args.key_file, plugin=plugin) for url in args.url]
    async with EngineClient() as client:
        sent = (client.generate(*pair, timeout=TIMEOUT) for pair in zip(cycle(engines), requests, strict=False))
        replies = await asyncio.gather(*sent)
    return sum(len(sample.token_ids) for samples in replies for sample in samples)


async def measure(args: argparse.Namespace, route: str) -> dict[str, Any]:
    requests = requests_of(args)
    started, worked = time.perf_counter(), time.process_time()
    tokens = await (
        bare(args, requests) if route == "bare" else through_client(args, requests, plugin=route == "arrays")
    )
    seconds = time.perf_counter() - started
    return {
        "route": route,
        "engines": len(args.url),
        "samples": args.samples,
        "n": args.n,
        "tokens": tokens,
        "logprobs": not (route == "bare" and args.no_logprobs),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds),
        "client_processor_seconds": round(time.process_time() - worked, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", nargs="+", required=True)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--routes", nargs="+", choices=("bare", "own", "arrays"), default=("bare", "own", "arrays"))
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--n", type=int, default=1, help="samples of a prompt in one request")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="of a sample")
    parser.add_argument("--no-logprobs", action="store_true", help="for the bare route")
    parser.add_argument("--rounds", type=int, default=2, help="of each route; the first warms up")
    args = parser.parse_args()
    for route in args.routes:
        for number in range(args.rounds):
            print(json.dumps(asyncio.run(measure(args, route)) | {"round": number}), flush=True)


if __name__ == "__main__":
    main()
