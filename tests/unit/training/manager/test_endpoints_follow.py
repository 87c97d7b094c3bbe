"""endpoints.json of a run whose engines come and go: only what changed is changed, whoever else writes into it."""

from __future__ import annotations

import pytest

from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints, edit_endpoints, resolve
from rltool.training.manager.endpoints_follow import EndpointsFollow

A, B, C = (EngineEndpoint(url=f"http://127.0.0.1:700{n}", dialect="vllm") for n in range(3))
ROUTER = "http://127.0.0.1:9"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "endpoints.json"


@pytest.fixture
def follow(file):
    """follow(begins with, *states): the file's engines after each state."""
    said: list[str] = []

    def run(first, *states, data_url=None):
        following = EndpointsFollow(file, first, data_url=data_url, log=said.append)
        for state in states:
            following.follow(lambda state=state: state)
        return resolve([f"@{file}"])

    run.said = said
    return run


def urls(found: ModelEndpoints) -> list[str]:
    return [engine.url for engine in found.engines]


def test_engines_that_come_are_put_in_and_those_that_leave_taken_out(file, follow):
    Endpoints(models={"policy": ModelEndpoints(engines=(A, B), data_url=ROUTER)}).save(file)
    found = follow([A, B], [A, B, C], [B, C])
    assert urls(found) == [B.url, C.url] and found.data_url == ROUTER


def test_what_others_wrote_there_meanwhile_is_left_alone(file, follow):
    judge = ModelEndpoints(update_weights=False, engines=(EngineEndpoint(url="http://127.0.0.1:7999"),))
    Endpoints(models={"judge": judge, "policy": ModelEndpoints(engines=(A, B))}).save(file)
    assert urls(follow([A], [A, C])) == [A.url, B.url, C.url], "B is somebody else's"
    assert Endpoints.load(file).models["judge"] == judge


def test_the_model_is_found_by_its_engines_whatever_its_name(file, follow):
    Endpoints(models={"mine": ModelEndpoints(engines=(A,))}).save(file)
    assert urls(follow([A], [A, B])) == [A.url, B.url]
    assert list(Endpoints.load(file).models) == ["mine"]


def test_a_run_that_was_given_bare_addresses_has_a_file_from_the_first_change_on(file, follow):
    EndpointsFollow(file, [A], data_url=ROUTER, log=follow.said.append).follow(lambda: [A])
    assert not file.exists(), "nothing has changed"
    found = follow([A], [A, B], data_url=ROUTER)
    assert urls(found) == [A.url, B.url] and found.data_url == ROUTER


def test_a_file_that_others_made_has_the_whole_fleet_after_a_change(file, follow):
    """serve-engines wrote its own engines there; the run was given another one by its address."""
    Endpoints(models={"policy": ModelEndpoints(engines=(B,))}).save(file)
    found = follow([A], [A, B], data_url=ROUTER)
    assert urls(found) == [A.url, B.url] and found.data_url == ROUTER


def test_a_router_that_others_took_out_of_the_file_stays_out(file, follow):
    following = EndpointsFollow(file, [A], data_url=ROUTER, log=follow.said.append)
    following.follow(lambda: [A, B])
    Endpoints(models={"policy": ModelEndpoints(engines=(A, B))}).save(file)  # as serve-engines does that gave it up
    following.follow(lambda: [A, B, C])
    found = resolve([f"@{file}"])
    assert urls(found) == [A.url, B.url, C.url] and found.data_url is None


def test_a_file_that_cannot_be_written_is_said_and_the_run_goes_on(file, follow):
    file.write_text("{")
    EndpointsFollow(file, [A], data_url=None, log=follow.said.append).follow(lambda: [A, B])
    assert len(follow.said) == 1 and str(file) in follow.said[0]


def test_an_engine_that_came_back_has_its_new_facts(file, follow):
    Endpoints(models={"policy": ModelEndpoints(engines=(A,))}).save(file)
    again = B.model_copy(update={"boot_id": "second"})
    found = follow([A], [A, B], [A], [A, again])
    assert found.engines[1].boot_id == "second"


def test_an_edit_waits_for_another_ones_end(file):
    """Two processes that read, change and write at once would lose one change."""
    import threading

    inside, go_on = threading.Event(), threading.Event()

    def slow(endpoints):
        inside.set()
        assert go_on.wait(30)
        return endpoints.with_engines("policy", [A], None)

    first = threading.Thread(target=edit_endpoints, args=(file, slow))
    first.start()
    assert inside.wait(30)
    second = threading.Thread(
        target=edit_endpoints,
        args=(file, lambda found: found.with_engines("policy", [*found.models["policy"].engines, B], None)),
    )
    second.start()
    go_on.set()
    first.join(30)
    second.join(30)
    assert urls(resolve([f"@{file}"])) == [A.url, B.url]
