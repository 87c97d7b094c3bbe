"""What a client may have, in numbers and bytes, and what it sends: refused by name."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.test_utils import TestClient, TestServer

import rltool.tinker.service as service_module
from rltool.config.serve_trainer import ServeTrainerConfig
from rltool.errors import UsageError
from rltool.tinker.limits import Refused, size_of
from rltool.tinker.samples import Samples
from rltool.tinker.server import PREFIX, TinkerServer
from rltool.tinker.service import Service
from tests.contract.tinker.protos import forward_proto
from tests.contract.tinker.services import (
    Endless,
    forward,
    is_done,
    made,
    make,
    model_of,
    running_on,
)


@pytest.mark.parametrize("number", [-1, 2**63, 10**300, 1.5, "1", True, None])
def test_numbers_that_names_of_files_are_made_of_are_bounded_and_numbers_of_calls_are_numbers(tmp_path, number):
    """A name that the file system refuses would end the server, at each of its starts."""

    async def case() -> None:
        service, _ = make(tmp_path)
        model = await model_of(service, "a")
        of_session = {"session_id": model.partition(":")[0], "base_model": "base"}
        for refused in (
            service.create_model("a", of_session | {"model_seq_id": number}),
            service.optim_step("a", {"model_id": model, "seq_id": number}),
            service.save_weights_for_sampler("a", {"model_id": model, "seq_id": number, "sampling_session_seq_id": 0}),
            service.open_sampler("a", of_session | {"sampling_session_seq_id": number}),
        ):  # fmt: skip
            with pytest.raises(UsageError, match=r"expected an integer from 0 to 2\*\*63 - 1"):
                await refused
        with pytest.raises(UsageError, match="learning_rate is 1000+, expected a number"):
            await service.optim_step("a", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 10**400}})
        seeded = of_session | {"model_seq_id": 1, "lora_config": {"rank": 1, "seed": number}}
        if number is None or number == -1:
            await service.create_model("a", seeded)
        else:
            with pytest.raises(UsageError, match="lora_config.seed is .*, expected an integer"):
                await service.create_model("a", seeded)

    asyncio.run(case())


def test_limits_are_refused_by_name(tmp_path):
    async def case() -> None:
        service, _ = make(tmp_path, in_flight=3, models=1, checkpoints=1)
        model = await model_of(service, "a")
        with pytest.raises(UsageError, match="1 models, the most"):
            await model_of(service, "a")
        await service.save_weights("a", {"model_id": model, "seq_id": 1, "path": "x"})
        with pytest.raises(UsageError, match="a name is given once"):
            await service.save_weights("a", {"model_id": model, "seq_id": 2, "path": "x"})
        with pytest.raises(UsageError, match="1 checkpoints, the most"):
            await service.save_weights("a", {"model_id": model, "seq_id": 2, "path": "y"})
        await forward(service, "a", model, 2)
        with pytest.raises(Refused, match="3 calls wait already") as error:
            await forward(service, "a", model, 3)
        assert error.value.status == 429
        await model_of(service, "b")  # has limits of its own

    asyncio.run(case())


def test_bytes_of_calls_and_samples_are_bounded_together_and_counted_again_after_a_restart(tmp_path):
    """Of a call that fails, and a sample that is cancelled, too."""
    size = len(forward_proto("0" * 24 + ":train:0", 2, tokens=[1, 2, 3], targets=[2, 3, 5]))
    sample = {"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": [{"tokens": [1]}]}}
    sample["sampling_params"] = {"max_tokens": 1, "stop": ["x"]}

    async def case() -> None:
        service, _ = make(tmp_path, queued_bytes=4 * size)
        model = await model_of(service, "a")
        before = service.queued.by_client()["a"]
        assert 0 < before < size
        calls = [await forward(service, "a", model, seq) for seq in (1, 2)]
        assert service.queued.by_client() == {"a": before + 2 * size}
        samples = Samples(Endless(), vocab_size=10, most=9, queued=service.queued)
        number = samples.begin("a", sample, lambda: None)
        text = f"{before + 2 * size} bytes of calls and {service.queued.samples['a']} of samples have not ended, and "
        text += f"a client may have {4 * size} bytes .--max-queued-bytes. in all"
        with pytest.raises(Refused, match=text) as error:
            await forward(service, "a", model, 3)
        assert error.value.status == 429
        assert await forward(service, "a", model, 2) == calls[1], "a repetition has its room"
        with pytest.raises(Refused, match="--max-queued-bytes") as error:
            samples.begin("a", sample | {"seq_id": 2}, lambda: None)
        assert error.value.status == 429
        await model_of(service, "b")  # has bytes of its own
        samples.cancel("a", number)
        assert "cancelled" in (await samples.result("a", number, 5) or {})["error"]
        assert service.queued.by_client()["a"] == before + 2 * size
        calls.append(await forward(service, "a", model, 3))
        with pytest.raises(Refused, match="--max-queued-bytes"):
            samples.begin("a", sample | {"seq_id": 2}, lambda: None)
        await samples.close()
        service.close()

        again, _ = make(tmp_path, queued_bytes=4 * size)
        assert again.queued.by_client()["a"] == before + 3 * size
        with pytest.raises(Refused, match=f"{before + 3 * size} bytes of calls and 0 of samples"):
            await forward(again, "a", model, 4)
        running = asyncio.create_task(again.run())
        assert "proto" in (await again.result("a", calls[2].number, 5) or {})
        wrong = await again.on_model("a", "optim_step", model, 4, {"adam_params": {"beta3": 0.5}})
        assert "error" in (await again.result("a", wrong.number, 5) or {})
        assert again.queued.by_client() == {}
        running.cancel()
        await asyncio.wait({running})
        for room, status in ((1.5, 429), (0.5, 413)):
            again.queued._most = int(room * size)
            await forward(again, "a", model, 5)
            with pytest.raises(Refused, match="--max-queued-bytes") as error:
                await forward(again, "a", model, 6)
            assert error.value.status == status
        again.close()

    asyncio.run(case())
    with pytest.raises(ValueError, match="less than max_body_bytes"):
        ServeTrainerConfig(max_queued_bytes=2000)


def test_bytes_of_results_are_bounded_and_one_that_was_let_go_is_an_error_by_name_over_a_restart_too(tmp_path):
    """Those that were fetched go first, then the oldest; another client's stay."""

    async def size_of_one() -> int:
        service, _ = make(tmp_path / "size")
        running = asyncio.create_task(service.run())
        call = await forward(service, "a", await made(service, "a"), 1)
        size = size_of(await service.result("a", call.number, 5) or {})
        running.cancel()
        await asyncio.wait({running})
        service.close()
        return size

    async def first(service: Service) -> list[int]:
        other = await forward(service, "b", await made(service, "b"), 1)
        await is_done(service, other)
        model, numbers = await made(service, "a"), list[int]()
        for seq in range(1, 6):
            call = await forward(service, "a", model, seq)
            await is_done(service, call)
            numbers.append(call.number)
            if seq == 2:
                assert "proto" in (await service.result("a", call.number, 0) or {})
            if seq == 3:
                assert await let_go(service, numbers) == [2], "what was fetched"
        assert await let_go(service, numbers) == [1, 2, 3]
        assert "proto" in (await service.result("b", other.number, 0) or {})
        return numbers

    async def let_go(service: Service, numbers: list[int]) -> list[int]:
        assert 0 < service.kept.bytes["a"] <= service.kept._most
        found = [service._journal.results[number] for number in numbers]
        return [seq for seq, result in enumerate(found, 1) if "proto" not in result]

    async def then(service: Service, numbers: list[int]) -> None:
        assert await let_go(service, numbers) == [1, 2, 3], "counted again"
        for place, number in enumerate(numbers):
            found = await service.result("a", number, 0) or {}
            if place < 3:
                text = f"ResultGone: the forward_backward was carried out, and its result of {size} bytes was let go"
                assert text in found["error"] and "(--max-queued-bytes)" in found["error"]
                assert found["category"] == "server"
            else:
                assert "proto" in found

    size = asyncio.run(size_of_one())
    most = int(2.5 * size)
    service, _ = make(tmp_path / "a", snapshot_every=100, queued_bytes=most)
    numbers = asyncio.run(running_on(service, first(service)))
    results = tmp_path / "a" / "results.jsonl"
    assert "ResultGone" not in results.read_text()
    for snapshot_every in (100, 1, 100):
        service, _ = make(tmp_path / "a", snapshot_every=snapshot_every, queued_bytes=most)
        asyncio.run(running_on(service, then(service, numbers)))
    assert results.read_text().count("ResultGone") == 3, "their bytes have left the disk, too"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adam_params": {"momentum": 1}}, "momentum is not supported"),
        ({"adam_params": {"beta1": "x"}}, "expected a number"),
        ({"optimizer_params": {"type": "dimuon"}}, "optimizer 'dimuon' is not supported"),
        ({"foo": 1}, "foo is not supported"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(tmp_path, given, message):
    async def case() -> None:
        service, _ = make(tmp_path)
        model = await model_of(service, "a")
        with pytest.raises(UsageError, match=message):
            await service.optim_step("a", {"model_id": model, "seq_id": 1, **given})
        with pytest.raises(UsageError, match="overwrite is not supported"):
            await service.save_weights("a", {"model_id": model, "seq_id": 1, "overwrite": True})
        with pytest.raises(UsageError, match="ttl_seconds is 5, expected an integer from 3600 to 315360000"):
            await service.save_weights("a", {"model_id": model, "seq_id": 1, "ttl_seconds": 5})

    asyncio.run(case())


def test_over_http_a_body_that_is_too_large_is_refused_by_its_size(tmp_path):
    service, _ = make(tmp_path, body_bytes=2000)
    server = TinkerServer(service, {"a": "tml-a"})

    async def scenario() -> None:
        async with TestClient(TestServer(server.app())) as http:
            model = await model_of(service, "a")
            proto = forward_proto(model, 1, tokens=[1] * 200, targets=[2] * 200)
            for kind, body in (("x-protobuf", proto), ("json", b'"' + b"x" * 2000 + b'"')):
                head = {"X-API-Key": "tml-a", "Content-Type": f"application/{kind}"}
                route = "forward_backward" if kind == "x-protobuf" else "optim_step"
                async with http.post(PREFIX + route, data=body, headers=head) as reply:
                    assert reply.status == 413 and "more than 2000 bytes" in (await reply.json())["error"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("most", "rank", "message"),
    [
        (8, 0, "takes adapters up to rank 8, and one that is started with --lora-rank 0 trains all weights"),
        (8, 9, "takes adapters up to rank 8"), (0, 4, "trains all weights: ask for rank 0"), (8, -1, "at least 0"),
    ],
)  # fmt: skip
def test_ranks_that_the_server_does_not_train_are_refused_and_another_kind_of_model_at_its_start(
    tmp_path, most, rank, message
):
    async def case() -> None:
        service, _ = make(tmp_path, rank=most)
        session = await service.open_session("a")
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base"}
        with pytest.raises(UsageError, match=message):
            await service.create_model("a", body | {"lora_config": {"rank": rank}})
        await service.create_model("a", body | {"lora_config": {"rank": most}})
        service.close()

    asyncio.run(case())
    what = "an adapter" if most else "all weights"
    with pytest.raises(UsageError, match=f"trains {what}, and --lora-rank is"):
        make(tmp_path, rank=0 if most else 8)


def test_of_results_that_nobody_fetches_the_newest_are_kept_and_an_older_one_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "RESULTS", 1)

    async def case(service: Service) -> None:
        model = await made(service, "a")
        calls = [await forward(service, "a", model, 1)]
        for seq in range(2, 7):
            await is_done(service, calls[-1])
            calls.append(await forward(service, "a", model, seq))
        await is_done(service, calls[-1])
        assert "proto" in (await service.result("a", calls[-1].number, 0) or {})
        text = "is kept no more: it was fetched long ago, or 3 newer ones of this client came before it was"
        with pytest.raises(Refused, match=text) as error:
            await service.result("a", calls[0].number, 0)
        assert error.value.status == 404
        assert 0 < service.kept.bytes["a"] < 6 * size_of(await service.result("a", calls[-1].number, 0) or {})

    service, _ = make(tmp_path, snapshot_every=1, in_flight=3)
    asyncio.run(running_on(service, case(service)))
