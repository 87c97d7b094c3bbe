"""Addresses at which no server of ours is: what they send fills neither the memory of who asks nor his terminal."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from rltool.agents.sessions import GatewayClient
from rltool.engines.client import EngineClient, RetryPolicy
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.replies import QUOTED_CHARACTERS, quote
from rltool.engines.run_client import Driver
from rltool.engines.sync_client import send
from rltool.engines.types import CONTROL_REPLY_BYTES, GenerateRequest, HttpRequest, Routing, SamplingParams, TokenStream
from rltool.errors import EngineError, RltoolError
from rltool.rollout.rewards.remote import REPLY_BYTES, remote
from rltool.rollout.sample import Sample, SampleStatus

PIECE = bytes(64 * 1024)
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + PIECE + b"\r\n"
GARBAGE = b"\x00\x1b]0;owned\x07\xff" * 50_000, b""
IN_FLIGHT = 32 * 1024 * 1024
"""More than the buffers of sockets and clients hold."""


@contextmanager
def server(first: bytes, then: bytes) -> Iterator[SimpleNamespace]:
    """Answers each connection with `first`, and with `then` until it is closed. sent: bytes in all."""
    listening = socket.create_server(("127.0.0.1", 0))
    found = SimpleNamespace(url=f"http://127.0.0.1:{listening.getsockname()[1]}", sent=0)
    threads = []

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(10)
            connection.recv(65536)
            connection.sendall(first)
            while then:
                connection.sendall(then)
                found.sent += len(then)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield found
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for thread in [accepting, *threads]:
            thread.join(15)
            assert not thread.is_alive(), "the client did not hang up"


def asynchronous(scenario):
    async def main():
        async with EngineClient(retry=RetryPolicy(attempts=2, first_delay=0.001)) as client:
            return await scenario(client)

    return asyncio.run(main())


def sample() -> Sample:
    return Sample(0, 0, 0, [1], response_ids=[1], response_mask=[1], response_logprobs=[-1.0],
                  status=SampleStatus.COMPLETED)  # fmt: skip


def driver(url, tmp_path):
    (tmp_path / "key").write_text("k")
    return Driver(url, tmp_path / "key")


GENERATION = GenerateRequest((1, 2, 3), SamplingParams(max_tokens=4), uuid.uuid4().hex)
def generate(url):
    return asynchronous(lambda c: c.generate(EngineEndpoint(url=url, dialect="vllm"), GENERATION, timeout=60))


def stream(url):
    where = EngineEndpoint(url=url, dialect="vllm")
    return asynchronous(lambda c: c.stream(where, GENERATION, TokenStream(lambda piece: None), timeout=60))


def open_session(url):
    return asynchronous(lambda c: GatewayClient(c, url, "key", seconds=60).open({}))


def probe(url):
    return asynchronous(lambda c: c.probe(EngineEndpoint(url=url), timeout=60))


ASKED = {
    "engine": (lambda url, _: probe(url), CONTROL_REPLY_BYTES),
    "generation": (lambda url, _: generate(url), GENERATION.reply_bytes),
    "stream": (lambda url, _: stream(url), GENERATION.reply_bytes),
    "router": (lambda url, _: send(url, HttpRequest("GET", "/workers"), timeout=60), CONTROL_REPLY_BYTES),
    "gateway": (lambda url, _: open_session(url), CONTROL_REPLY_BYTES),
    "driver": (lambda url, tmp_path: driver(url, tmp_path).status(), CONTROL_REPLY_BYTES),
    "reward": (lambda url, _: asyncio.run(remote(sample(), "", url=url, timeout=60)), REPLY_BYTES),
}


@pytest.mark.parametrize("who", ASKED)
def test_an_endless_reply_is_read_up_to_a_limit_that_the_error_names(who, tmp_path):
    ask, limit = ASKED[who]
    with server(*ENDLESS) as endless, pytest.raises(EngineError, match=f"answered with more than {limit:,} bytes"):
        ask(endless.url, tmp_path)
    assert endless.sent < limit + IN_FLIGHT


def test_a_stream_ends_at_the_number_of_tokens_that_were_asked_for():
    choice = {"token_ids": [1], "logprobs": {"content": [{"token_id": 1, "logprob": -1.0}]}}
    event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    with (
        server(ENDLESS[0], b"%x\r\n%b\r\n" % (len(event), event)) as endless,
        pytest.raises(EngineError, match="more than max_tokens"),
    ):
        stream(endless.url)


@pytest.mark.parametrize("who", ASKED)
def test_bytes_that_are_no_http_are_quoted_in_a_few_hundred_characters_that_can_be_printed(who, tmp_path):
    with server(*GARBAGE) as garbage, pytest.raises(RltoolError) as error:
        ASKED[who][0](garbage.url, tmp_path)
    text = str(error.value)
    assert garbage.url in text and len(text) < 2 * QUOTED_CHARACTERS and text.isprintable()


def test_a_quotation_is_one_line_of_what_can_be_printed():
    assert quote("a\n b\x1b[2J\x00") == "a b\\x1b[2J\\x00" and quote(" \n") == "(empty reply)"
    assert quote("x" * QUOTED_CHARACTERS) == "x" * QUOTED_CHARACTERS
    assert quote("x" * (QUOTED_CHARACTERS + 1)) == "x" * QUOTED_CHARACTERS + " ..."
    assert quote(" " * 100_000 + "x") == "x" and len(quote("\x00" * 10**6)) == QUOTED_CHARACTERS + 4


def test_a_generation_may_answer_with_as_much_as_it_was_asked_for():
    """1,000 tokens, four times, with masks of 50 and the experts of 94 layers: ids, log-probabilities and lists in JSON
    have fewer bytes than the limit, and a hundred times as many have more."""
    sampling = SamplingParams(max_tokens=1000, top_k=50, return_sampling_mask=True)
    routed = GenerateRequest((1,) * 500, sampling, "r", n=4, routing=Routing(layers=94, top_k=8, experts=128))
    per_token = len('{"token": "token_id:151642", "logprob": -12.345678901234567, "bytes": null}, ')
    masks, experts = 1000 * 50 * len("151642, "), 1500 * 94 * 8 * len("127, ")
    answer = 4 * (1500 * per_token + masks + experts)
    assert answer < routed.reply_bytes < 100 * answer
    assert GENERATION.reply_bytes < 2 * CONTROL_REPLY_BYTES
