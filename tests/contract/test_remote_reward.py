"""A reward over HTTP, against a server that answers, fails, refuses or hangs as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rltool.rollout.rewards.pool import RewardFailure, RewardPool
from rltool.rollout.sample import Sample, SampleStatus
from tests.http_server import Quiet, answering


@contextmanager
def server(*replies) -> Iterator[tuple[str, list]]:
    """replies: (status, body) in order, the last one for ever; None hangs until the end. Yields URL and bodies."""
    received: list = []
    over = threading.Event()

    class Handler(Quiet):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            reply = replies[min(len(received), len(replies)) - 1]
            if reply is None:
                over.wait()
                return
            status, body = reply
            data = json.dumps(body).encode() if not isinstance(body, bytes) else body
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with answering(Handler) as url:
        try:
            yield f"{url}/score", received
        finally:
            over.set()


def ask(url: str, *, deadline: float = 30.0, **options):
    sample = Sample(
        group_id=0, index=0, prompt_index=0, prompt_ids=[1], prompt_text="6x7", label="42", metadata={"k": 1},
        status=SampleStatus.COMPLETED,
    )  # fmt: skip

    async def run():
        pool = RewardPool("remote", workers=1, timeout=deadline, options={"url": url, "pause": 0.001, **options})
        try:
            [value] = await pool.score([sample], ["it is 42"])
        finally:
            await pool.close()
        return value.reason if isinstance(value, RewardFailure) else value

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "options", "reward"), [(0.5, {}, 0.5), ({"reward": 1}, {}, 1.0), ({"score": 2.5}, {"key": "score"}, 2.5)]
)
def test_the_server_gets_the_sample_and_gives_a_number(body, options, reward):
    with server((200, body)) as (url, received):
        assert ask(url, **options) == reward
    assert received == [{"prompt": "6x7", "response": "it is 42", "label": "42", "metadata": {"k": 1}}]


@pytest.mark.parametrize("failure", [(500, "down"), (503, "busy"), (429, "slow"), (408, "late")])
def test_what_may_pass_is_tried_again(failure):
    with server(failure, failure, (200, 1.0)) as (url, received):
        assert ask(url) == 1.0
    assert len(received) == 3


def test_a_server_that_stays_down_fails_the_sample_with_its_last_reason():
    with server((500, "down")) as (url, received):
        said = ask(url, retries=2)
    assert len(received) == 3
    assert f'EngineError: {url} gave no reward in 3 attempts: HTTP 500: "down"' in said
    said = ask(url, retries=1)
    assert "gave no reward in 2 attempts: ClientConnectorError" in said


def test_a_request_that_is_refused_is_not_repeated():
    with server((422, "no label")) as (url, received):
        assert 'refuses the sample: HTTP 422: "no label"' in ask(url)
    assert len(received) == 1


NO_REWARD = "is neither a number nor an object"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("1.0", NO_REWARD), ({"other": 1}, NO_REWARD), (True, NO_REWARD), ([1], NO_REWARD),
        (b"<html>", NO_REWARD),
    ],
)  # fmt: skip
def test_a_reply_of_another_form_is_no_reward(body, why):
    with server((200, body)) as (url, received):
        said = ask(url)
    assert why in said
    assert len(received) == 1


def test_a_server_that_hangs_costs_one_attempt_after_the_other_and_then_the_deadline():
    with server(None, (200, 1.0)) as (url, received):
        assert ask(url, timeout=1.0) == 1.0
    assert len(received) == 2
    with server(None) as (url, _):
        assert ask(url, deadline=0.3, timeout=100.0) == "no answer within deadlines.call = 0.3 s"
