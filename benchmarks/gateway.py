"""What the gateway adds to a turn: fake engines that answer by the clock, many sessions at once, each with its history.

    python -m benchmarks.gateway --sessions 1000 --turns 5 --seconds 5

    python -m benchmarks.gateway --sessions 2000 --seconds 10 --processes 2

    python -m benchmarks.gateway --first-token RUN          with `rltool serve-engines` and `rltool gateway` of that run

Each session keeps one turn in flight, over a connection of its own, so sessions / seconds turns come each second.
The gateway's own latency of a turn has two parts: from the moment that the client sends it until the kernel has all of
the gateway's request at the engine, and from the engine's answer until the kernel has all of the gateway's answer at
the client. Waiting for the gateway is in it; that client and engines come late to their sockets, on the same cores, is
not, and is printed beside it.

--first-token asks one engine, directly and through the gateway in turns, for streams with prompts of one length, which
no prefix cache holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from benchmarks.fake_engine import StampedSocket, arrived, collect_new_objects_alone
from benchmarks.rollout_manager import fake_engines
from rltool.config.gateway import GatewayConfig
from rltool.engines.endpoints import resolve
from rltool.gateway.parts import Parts
from rltool.processes.ports import reserved_ports
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.quickstart.tiny_model import make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '.' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
KEY = "benchmark"
SYSTEM = "you are a careful agent. " * 40
"""One thousand tokens."""


@contextmanager
def gateway(
    root: Path, endpoints: list[Any], max_model_len: int, processes: int = 1
) -> Iterator[tuple[str, list[psutil.Process]]]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "tokenizer")
    (root / "key").write_text(KEY)
    parts = Parts(
        served_name="policy",
        max_model_len=max_model_len,
        tokenizer=root / "tokenizer",
        endpoints=tuple(endpoints),
        sessions=root / "sessions",
        key_file=root / "key",
    )
    with reserved_ports(1) as reserved:
        port = reserved.ports[0]
        reserved.release()
    config = GatewayConfig(port=port, processes=processes)
    argv = [sys.executable, "-m", "rltool.gateway.main", "--config", config.model_dump_json()]
    argv += ["--parts", parts.model_dump_json()]
    started = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    try:
        assert all(one.stdout is not None and "serving" in one.stdout.readline() for one in started)
        yield f"http://127.0.0.1:{port}", [psutil.Process(one.pid) for one in started]
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.wait(30)


async def timed(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any], key: str | None = None
) -> tuple[float, Any]:
    started = time.perf_counter()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with client.post(url, json=body, headers=headers) as response:
        reply = await response.json()
        assert response.status < 300, reply
    return time.perf_counter() - started, reply


class Agent:
    """One session and its connection. times: of each turn the moment when it was sent, when the kernel had the whole
    answer, and when the agent had it."""

    def __init__(self, session: dict[str, Any], turns: int) -> None:
        self.session, self.turns = session, turns
        self.times: list[tuple[float, float, float]] = []

    async def run(self, start: float) -> None:
        await asyncio.sleep(start)
        url = urlsplit(f"{self.session['openai_base_url']}/chat/completions")
        connection = StampedSocket()
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (url.hostname, url.port))
        reader, writer = await asyncio.open_connection(sock=connection)
        head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {self.session['key']}\r\n"
        messages = [{"role": "system", "content": SYSTEM}]
        for _ in range(self.turns):
            messages.append({"role": "user", "content": "what is next?"})
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            asked = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            sent = time.time()
            writer.write(asked)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer.lower())
            assert answer.startswith(b"HTTP/1.1 200") and length, answer
            reply = json.loads(await reader.readexactly(int(length[1])))
            self.times.append((sent, arrived(writer.transport), time.time()))
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        writer.close()


def used(processes: list[psutil.Process]) -> tuple[int, float]:
    """(bytes of memory, seconds of CPU), of all of them together."""
    return sum(p.memory_info().rss for p in processes), sum(sum(p.cpu_times()[:2]) for p in processes)


async def measure(
    url: str, processes: list[psutil.Process], engines: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    count, turns = options.sessions, options.turns
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        opened = [(await timed(client, f"{url}/sessions", {}, KEY))[1] for _ in range(count + 1)]
        agents = [Agent(session, turns) for session in opened[1:]]
        await Agent(opened[0], 2).run(0.0)  # what transformers imports at its first use is no turn's cost
        collect_new_objects_alone()
        memory, cpu = used(processes)
        starts = (options.seconds * i / count for i in range(count))  # not all at the same moment
        await asyncio.gather(*(agent.run(start) for agent, start in zip(agents, starts, strict=True)))
        memory, cpu = (after - before for after, before in zip(used(processes), (memory, cpu), strict=True))
        at_engines: dict[str, list[tuple[float, float, float]]] = {}
        for engine in engines:
            async with client.get(f"{engine}/times") as response:
                for session, times in (await response.json()).items():
                    at_engines[session] = sorted([*at_engines.get(session, ()), *times])
    pairs = [
        (ours, theirs)
        for agent in agents
        for ours, theirs in zip(agent.times, at_engines[agent.session["id"]], strict=True)
    ]

    def milliseconds(of: Callable[[tuple[float, float, float], tuple[float, float, float]], float]) -> list[float]:
        rows = sorted(of(*pair) for pair in pairs)
        return [round(1000 * rows[math.ceil(share * len(rows)) - 1], 1) for share in (0.5, 0.99, 1)]

    return {
        "turns": len(pairs),
        "turns a second": round(count / options.seconds),
        "median, p99 and longest, ms": {
            "the gateway's own": milliseconds(lambda ours, theirs: theirs[0] - ours[0] + ours[1] - theirs[2]),
            "of it before the engine": milliseconds(lambda ours, theirs: theirs[0] - ours[0]),
            "of it behind the engine": milliseconds(lambda ours, theirs: ours[1] - theirs[2]),
            "beside it, until the engine looks": milliseconds(lambda ours, theirs: theirs[1] - theirs[0]),
            "beside it, until the client looks": milliseconds(lambda ours, theirs: ours[2] - ours[1]),
            "more than the engine's, as the client sees it": milliseconds(
                lambda ours, theirs: ours[2] - ours[0] - options.seconds
            ),
        },
        "CPU of the gateway a turn, ms": round(1000 * cpu / len(pairs), 2),
        "memory a session, KiB": round(memory / count / 1024, 1),
    }


async def first_piece(client: aiohttp.ClientSession, url: str, body: dict[str, Any], key: str) -> float:
    """Milliseconds until the first event has come, which is at the first token; the stream is read to its end."""
    started, took, seen = time.perf_counter(), None, b""
    async with client.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        assert response.status == 200, await response.text()
        async for piece in response.content.iter_any():
            seen += piece
            if took is None and b"data:" in seen:
                took = 1000 * (time.perf_counter() - started)
    assert took is not None, seen
    return took


async def first_tokens(run: RunDirectory, count: int) -> dict[str, Any]:
    [engine] = resolve([f"@{run.path / 'endpoints.json'}"]).engines
    url = json.loads((run.path / "state" / "gateway.json").read_text())["url"]
    key = (run.path / "state" / "gateway.key").read_text().strip()
    alone, through, prompt = [], [], []
    async with aiohttp.ClientSession() as client:
        for number in range(count + 2):
            session = (await timed(client, f"{url}/sessions", {}, key))[1]
            messages = [{"role": "system", "content": f"{number}: {SYSTEM}"}, {"role": "user", "content": "next?"}]
            body = {"model": session["model"], "messages": messages, "max_tokens": 16, "stream": True}
            chat = f"{session['openai_base_url']}/chat/completions"
            through.append(await first_piece(client, chat, body, session["key"]))
            async with client.get(f"{url}/sessions/{session['id']}", headers={"Authorization": f"Bearer {key}"}) as got:
                [trajectory] = (await got.json())["trajectories"]
            prompt = trajectory["token_ids"][: trajectory["loss_mask"].index(1)][::-1]
            sampling = {"max_tokens": 16, "logprobs": 0, "detokenize": False}
            asked = {"token_ids": prompt, "request_id": uuid.uuid4().hex, "stream": True, "sampling_params": sampling}
            direct = f"{engine.url}/rltool/generate"
            alone.append(await first_piece(client, direct, asked, engine.read_key() or ""))
    alone, through = sorted(alone[2:]), sorted(through[2:])  # without what the first ones load
    middle = count // 2
    return {
        "prompt tokens": len(prompt),
        "first token, engine alone, median and longest, ms": [round(alone[middle], 1), round(alone[-1], 1)],
        "through the gateway, median and longest, ms": [round(through[middle], 1), round(through[-1], 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="what an engine takes for a turn")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="of the gateway, behind one address")
    parser.add_argument("--first-token", metavar="RUN", help="of a running gateway and its one engine")
    options = parser.parse_args()
    if options.first_token:
        print(json.dumps(asyncio.run(first_tokens(open_run(options.first_token, create=False), 100)), indent=1))
        return
    with (
        tempfile.TemporaryDirectory() as root,
        fake_engines(options.engines, seconds=options.seconds, tokens=16) as endpoints,
        gateway(Path(root), endpoints, max_model_len=4096, processes=options.processes) as (url, processes),
    ):
        print(json.dumps(asyncio.run(measure(url, processes, [e.url for e in endpoints], options)), indent=1))


if __name__ == "__main__":
    main()
