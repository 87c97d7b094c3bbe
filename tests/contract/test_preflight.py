"""What `train` finds at the addresses it was given, over real sockets: each misfit is named before anything starts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from aiohttp import web

from rltool.config.loader import Loaded, load_config
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.types import GenerateRequest, SamplingParams
from rltool.errors import EngineError, UsageError
from rltool.training import prepare
from rltool.training.checks.preflight import (
    EnginesAway,
    check_fleet,
    check_router,
    describe_engines,
    describe_fleet,
    describe_tolerances,
    probe_fleet,
    resolve_endpoints,
    uncompared,
    with_difference_limit,
)
from tests.contract.fakes.server import FakeServer
from tests.contract.fakes.sglang import FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.e2e.engines import free_port

REFUSE = 'engines.foreign_workers="refuse"'


@pytest.fixture
def configure(tmp_path, key_file):
    """config(*addresses, more settings) of a model that the fakes serve."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "vocab_size": FakeVllm().vocab_size})
    )

    def config(*addresses: str, sets: tuple[str, ...] = (), key=key_file) -> TrainConfig:
        values = [
            f'model.path="{tmp_path}"',
            f"engines.external={json.dumps(addresses)}",
            "sampling.max_prompt_tokens=16",
            "sampling.max_response_tokens=16",
        ]
        values += [f'engines.api_key_file="{key}"'] if key else []
        return load_config(TrainConfig, [], [*values, *sets]).config

    return config


def preflight(config: TrainConfig):
    fleet = probe_fleet(resolve_endpoints(config), timeout=60.0)
    check_fleet(fleet, config, "cpu")
    return fleet


def test_engines_given_as_host_and_port_are_recognised_and_counted(configure, fake_vllm):
    with FakeVllm(key="test-key") as other:
        fleet = preflight(configure(fake_vllm.url.removeprefix("http://"), other.url))
    assert {e.dialect for e in fleet.endpoints.engines} == {"vllm"} and fleet.total_world_size == 2
    assert describe_fleet(fleet).startswith("2 x vllm")


@pytest.mark.parametrize(
    ("facts", "reported"),
    [
        ({"dialect": "sglang", "dp_size": 2}, True),
        ({"dialect": "sglang", "dp_size": 2, "own_seeds": False}, True),
        ({"dialect": "sglang", "dp_size": 2, "own_seeds": True}, False),
        ({"dialect": "sglang", "dp_size": 1, "own_seeds": False}, False),
        ({"dialect": "vllm", "dp_size": 2}, False),
    ],
)
def test_replicas_that_draw_the_same_numbers_are_named(configure, fake_vllm, facts, reported):
    config = configure(fake_vllm.url)
    fleet = preflight(config)
    alike = replace(fleet, infos={url: replace(info, **facts) for url, info in fleet.infos.items()})
    said = [line for line in describe_engines(alike, config) if "one random seed" in line]
    assert [line.startswith(f"{fake_vllm.url}: SGLang") for line in said] == [True] * reported


def test_every_address_that_does_not_answer_is_named(configure, fake_vllm):
    dead = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with pytest.raises(UsageError) as error:
        preflight(configure(fake_vllm.url, *dead))
    assert all(address in str(error.value) for address in dead) and fake_vllm.url not in str(error.value)
    assert "rltool serve-engines" in str(error.value)


def test_a_run_that_resumes_goes_on_without_engines_that_do_not_answer_if_enough_do(configure, fake_vllm):
    dead = f"http://127.0.0.1:{free_port()}"
    config = configure(fake_vllm.url, dead)
    fleet = probe_fleet(resolve_endpoints(config), timeout=5, needed=1)
    assert [engine.url for engine in fleet.endpoints.engines] == list(fleet.infos) == [fake_vllm.url]
    assert [engine.url for engine in fleet.absent] == [dead]
    [said] = [line for line in describe_engines(fleet, config) if dead in line]
    assert said.startswith(f"engine {dead} does not answer: the run goes on without it, and takes it in when it does")
    with FakeRouter(fake_vllm.url, dead) as router:
        behind = configure(fake_vllm.url, dead, sets=(f'engines.router="{router.url}"', REFUSE))
        check_router(probe_fleet(resolve_endpoints(behind), timeout=5, needed=1), behind)  # it is no stranger there
    with pytest.raises(UsageError, match=dead):
        probe_fleet(resolve_endpoints(config), timeout=5, needed=2)


def test_a_run_that_restarts_by_itself_waits_for_engines_that_are_started_again(configure, fake_vllm, monkeypatch):
    config = configure(fake_vllm.url, sets=("deadlines.preflight=3",))
    endpoints = resolve_endpoints(config)
    fake_vllm.die()
    with pytest.raises(EnginesAway, match=fake_vllm.url):
        prepare._probed(endpoints, 1, config, given="", patience=0.0)
    monkeypatch.setattr(prepare.time, "sleep", lambda seconds: fake_vllm.start())
    assert set(prepare._probed(endpoints, 1, config, given="", patience=60.0).infos) == {fake_vllm.url}


def test_no_run_goes_on_without_an_engine_that_refuses_its_key(configure, fake_vllm, tmp_path):
    (tmp_path / "other-key").write_text("wrong")
    with FakeVllm(key="wrong") as other:
        endpoints = resolve_endpoints(configure(fake_vllm.url, other.url, key=tmp_path / "other-key"))
        with pytest.raises(UsageError, match="401") as error:
            probe_fleet(endpoints, timeout=5, needed=1)
    assert fake_vllm.url in str(error.value) and other.url not in str(error.value)


@pytest.mark.parametrize(("content", "match"), [(None, "cannot read the key file"), ("", "is empty")])
def test_no_run_starts_with_a_key_that_cannot_be_read(configure, fake_vllm, tmp_path, content, match):
    if content is not None:
        (tmp_path / "other-key").write_text(content)
    with FakeVllm() as other:
        endpoints = resolve_endpoints(configure(fake_vllm.url, other.url, key=tmp_path / "other-key"))
        with pytest.raises(UsageError, match=match) as error:
            probe_fleet(endpoints, timeout=5, needed=1)
    assert not isinstance(error.value, EnginesAway), "waiting does not help"


def test_an_engine_that_hangs_is_named_with_the_deadline_that_has_passed(configure, fake_vllm):
    with FakeVllm(key="test-key") as hung:
        hung.hang("/version")
        with pytest.raises(UsageError, match=rf"{hung.url}.*no answer within 0.5 s.*deadlines.preflight has passed"):
            probe_fleet(resolve_endpoints(configure(fake_vllm.url, hung.url)), timeout=0.5)


def test_a_wrong_key_is_reported_as_that(configure, fake_vllm, tmp_path):
    (tmp_path / "other-key").write_text("wrong")
    with pytest.raises(UsageError, match="401"):
        preflight(configure(fake_vllm.url, key=tmp_path / "other-key"))


def test_another_vocabulary_is_refused(configure, fake_vllm):
    fake_vllm.vocab_size += 1
    with pytest.raises(UsageError, match="vocabulary"):
        preflight(configure(fake_vllm.url))


def test_a_stock_vllm_is_refused_behind_a_router_and_for_disk(configure, fake_stock_vllm):
    with pytest.raises(UsageError, match="cannot load weights from disk"):
        preflight(configure(fake_stock_vllm.url, key=None, sets=('weights.transport="disk"',)))


def test_an_sglang_engine_is_recognised(configure, tmp_path):
    (tmp_path / "sglang-key").write_text("fake-key")
    with FakeSglang() as engine:
        config = configure(engine.url, key=tmp_path / "sglang-key")
        fleet = probe_fleet(resolve_endpoints(config), timeout=60.0)
    assert (
        fleet.endpoints.engines[0].dialect == "sglang"
        and fleet.endpoints.engines[0].key_file == tmp_path / "sglang-key"
    )


@pytest.fixture
def sglang(configure, tmp_path):
    """(engine, more settings) -> what preflight makes of it."""
    (tmp_path / "sglang-key").write_text("fake-key")

    def check(engine: FakeSglang, *sets: str):
        with engine:
            return preflight(configure(engine.url, key=tmp_path / "sglang-key", sets=sets))

    return check


@pytest.mark.parametrize(("version", "named"), [("0.5.16", "too old"), ("0.5.24", "engines.newer_versions")])
def test_an_sglang_of_an_unknown_version_is_refused_by_name(sglang, version, named):
    with pytest.raises(UsageError, match=rf"is SGLang {version}.*{named}"):
        sglang(FakeSglang(version=version))


def test_a_newer_engine_is_taken_where_that_is_configured(sglang):
    sglang(FakeSglang(version="0.5.24"), "engines.newer_versions=true")


def test_an_sglang_that_names_one_version_a_response_needs_pauses_that_abort(sglang):
    with pytest.raises(UsageError, match=r'SGLang 0\.5\.17.*weights\.pause_mode to "abort"'):
        sglang(FakeSglang(version="0.5.17"), 'weights.pause_mode="keep"')
    sglang(FakeSglang(version="0.5.17"), 'weights.pause_mode="abort"')


def test_by_default_it_is_paused_so_and_the_log_says_why(configure, tmp_path):
    (tmp_path / "sglang-key").write_text("fake-key")
    with FakeSglang(version="0.5.17") as old, FakeSglang() as new:
        config = configure(new.url, old.url, key=tmp_path / "sglang-key")
        [line] = [line for line in describe_engines(preflight(config), config) if "pause_mode" in line]
    assert line.startswith(f"{old.url}: ") and '"abort"' in line and "SGLang 0.5.17" in line


def test_a_vllm_whose_samples_name_no_version_is_good_for_rollouts_alone(configure, fake_vllm):
    fake_vllm.engine_version = "0.31.0"
    with pytest.raises(UsageError, match="vLLM 0.31.0.*cannot be trained"):
        preflight(configure(fake_vllm.url))
    config = configure(fake_vllm.url)
    check_fleet(probe_fleet(resolve_endpoints(config), timeout=60.0), config, None)
    fake_vllm.engine_version = "0.28.1"
    with pytest.raises(UsageError, match="vLLM 0.28.1, which is too old"):
        check_fleet(probe_fleet(resolve_endpoints(config), timeout=60.0), config, None)


def test_an_engine_with_the_plugin_of_another_rltool_is_refused_before_anything_is_asked_of_it(configure, fake_vllm):
    fake_vllm.plugin_protocol = None
    with pytest.raises(UsageError, match=rf"{fake_vllm.url}.*plugin of an older rltool.*start it anew"):
        preflight(configure(fake_vllm.url))
    assert {request.method for request in fake_vllm.requests} == {"GET"}


def test_an_engine_that_does_not_compute_exactly_is_refused(configure, fake_vllm):
    config = configure(fake_vllm.url, sets=("algorithm.exact=true", 'model.dtype="bfloat16"'))
    for exact, named in ((True, None), (False, r"--exact`$"), (None, r"--exact`, and this release$")):
        fake_vllm.exact = exact
        fleet = probe_fleet(resolve_endpoints(config), timeout=60.0)
        if named is None:
            check_fleet(fleet, config, "cuda")
        else:
            with pytest.raises(UsageError, match=rf"does not compute as algorithm.exact needs: .*{named}"):
                check_fleet(fleet, config, "cuda")


def test_an_engine_whose_kernels_were_not_compared_does_not_serve_algorithm_exact_unless_allowed(configure, fake_vllm):
    fake_vllm.exact, fake_vllm.engine_version = True, "0.33.0"
    for sets, refused in ((("algorithm.exact=true",), True), (("algorithm.exact=true", "engines.newer_versions=true"),
                          False), ((), False)):  # fmt: skip
        config = configure(fake_vllm.url, sets=(*sets, 'model.dtype="bfloat16"'))
        fleet = probe_fleet(resolve_endpoints(config), timeout=60.0)
        if refused:
            with pytest.raises(UsageError, match=r"vLLM 0\.33\.0, and algorithm\.exact was compared with vLLM 0\.32"):
                check_fleet(fleet, config, "cuda")
        else:
            check_fleet(fleet, config, "cuda")


def test_an_engine_that_cannot_tell_what_top_k_left_is_refused(configure, fake_vllm, sglang):
    for top_k, refused in (("12", False), ("13", True)):
        config = configure(fake_vllm.url, sets=(f"sampling.top_k={top_k}", "sampling.top_p=0.9"))
        if refused:
            with pytest.raises(UsageError, match="start it with --max-logprobs 21, or lower sampling.top_k"):
                preflight(config)
        else:
            preflight(config)
    with pytest.raises(UsageError, match="is of sglang, which does not return the tokens"):
        sglang(FakeSglang(), "sampling.top_k=5")


@pytest.mark.parametrize("plugin", [False, True])
def test_an_engine_that_leaves_no_token_out_is_found_at_its_first_sample(fake_vllm, key_file, plugin):
    """A stock vLLM without --logprobs-mode processed_logprobs: nothing that a probe tells says so."""
    fake_vllm.raw_logprobs = True
    sampling = SamplingParams(max_tokens=4, top_p=0.9, top_k=3, return_sampling_mask=True)

    async def run():
        endpoint = EngineEndpoint(url=fake_vllm.url, dialect="vllm", plugin=plugin, key_file=key_file)
        async with EngineClient() as client:
            await client.generate(endpoint, GenerateRequest((5, 6), sampling, "a" * 32), timeout=60.0)

    with pytest.raises(EngineError, match="started without --logprobs-mode processed_logprobs"):
        asyncio.run(run())


def test_an_sglangs_sizes_and_vocabulary_are_read_where_it_read_its_model(sglang, tmp_path):
    served = tmp_path / "served"
    served.mkdir()
    described = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": FakeVllm().vocab_size, "hidden_size": 64}
    (served / "config.json").write_text(json.dumps(described))
    assert uncompared(sglang(FakeSglang(model_path=str(served)))) == []
    (served / "config.json").write_text(json.dumps(described | {"vocab_size": 7}))
    with pytest.raises(UsageError, match="vocabulary of 7"):
        sglang(FakeSglang(model_path=str(served)))
    (tmp_path / "config.json").write_text(json.dumps(described | {"hidden_size": 128}))
    with pytest.raises(UsageError, match="hidden_size is 64"):
        sglang(FakeSglang(model_path=str(served)))


def test_an_sglang_whose_model_is_on_another_host_is_not_compared_and_named(sglang):
    engine = FakeSglang(model_path="/not/here")
    (line,) = uncompared(sglang(engine))
    assert engine.url in line and "not compared" in line


def test_the_limit_of_a_step_follows_the_dtypes_unless_it_was_set(configure, fake_vllm):
    with FakeVllm(key="test-key") as rounding:
        rounding.dtype = "bfloat16"
        fleet = preflight(configure(fake_vllm.url, rounding.url))
        chosen = with_difference_limit(Loaded(configure(), {}), fleet)
    assert chosen.config.monitor.logprob_difference_limit == 0.2
    assert chosen.origins == {"monitor.logprob_difference_limit": "by dtype"}
    assert "trainer in float32, engines in bfloat16, float32" in describe_tolerances(fleet, chosen.config)
    assert "0.001 or 0.2 in the value check, 0.2 in a step" in describe_tolerances(fleet, chosen.config)
    exact = with_difference_limit(Loaded(configure(), {}), preflight(configure(fake_vllm.url)))
    assert exact.config.monitor.logprob_difference_limit == 0.1
    own = Loaded(configure(sets=("monitor.logprob_difference_limit=0.5",)), {})
    assert with_difference_limit(own, fleet) is own


def endpoints_file(path, *engines, update_weights):
    Endpoints(models={"policy": ModelEndpoints(update_weights=update_weights, engines=engines)}).save(path)
    return f"@{path}"


def test_an_engine_that_takes_no_weights_is_not_asked_for_a_weight_backend(configure, fake_vllm, tmp_path):
    fake_vllm.weight_backend = "nccl"  # of which the trainer can make nothing
    frozen = endpoints_file(tmp_path / "frozen", EngineEndpoint(url=fake_vllm.url), update_weights=False)
    with FakeVllm(key="test-key") as policy:
        fleet = preflight(configure(frozen, policy.url))
        assert set(fleet.takers) == {policy.url}
    with pytest.raises(UsageError, match="nccl|NCCL"):
        preflight(configure(fake_vllm.url))


def test_engines_of_which_none_takes_weights_cannot_be_trained_against(configure, fake_vllm, tmp_path):
    frozen = endpoints_file(tmp_path / "frozen", EngineEndpoint(url=fake_vllm.url), update_weights=False)
    with pytest.raises(UsageError, match="none of the given engines takes weights"):
        preflight(configure(frozen))


def test_an_engine_that_takes_no_weights_must_serve_the_model_all_the_same(configure, fake_vllm, tmp_path):
    fake_vllm.vocab_size += 1
    frozen = endpoints_file(tmp_path / "frozen", EngineEndpoint(url=fake_vllm.url), update_weights=False)
    with FakeVllm(key="test-key") as policy, pytest.raises(UsageError, match="vocabulary"):
        preflight(configure(frozen, policy.url))


class FakeRouter(FakeServer):
    """A router that lists these workers."""

    def __init__(self, *urls: str) -> None:
        super().__init__()
        self.urls = urls

    async def handle(self, recorded):
        if (recorded.method, recorded.path) != ("GET", "/workers"):
            return web.json_response({}, status=404)
        workers = [{"id": url, "url": url, "is_healthy": True, "model_id": "m", "load": 0} for url in self.urls]
        return web.json_response({"workers": workers})


def routed(configure, engine, router: str, *sets: str):
    config = configure(engine.url, sets=(f'engines.router="{router}"', *sets))
    check_router(probe_fleet(resolve_endpoints(config), timeout=60.0), config)


def test_a_router_with_foreign_workers_is_refused_where_that_is_configured(configure, fake_vllm):
    stranger = "http://10.9.9.9:8101"
    with FakeRouter(fake_vllm.url, stranger) as router:
        with pytest.raises(UsageError, match=f"{stranger}.*engines.foreign_workers"):
            routed(configure, fake_vllm, router.url, REFUSE)
        routed(configure, fake_vllm, router.url)
        assert {recorded.method for recorded in router.requests} == {"GET"}, "a check changes nothing"
    with FakeRouter(fake_vllm.url) as router:
        routed(configure, fake_vllm, router.url, REFUSE)


def test_a_router_that_does_not_tell_its_workers_is_refused(configure, fake_vllm):
    with pytest.raises(UsageError, match="router list"):
        routed(configure, fake_vllm, f"http://127.0.0.1:{free_port()}")
    behind = configure(fake_vllm.url, sets=(f'engines.router="http://127.0.0.1:{free_port()}"',))
    check_router(probe_fleet(resolve_endpoints(behind), timeout=60.0), behind, may_be_down=True)  # it resumes
    with FakeRouter() as router:
        router.fail("/workers", 404)
        with pytest.raises(UsageError, match=r"404(.|\n)*sglang-router"):
            routed(configure, fake_vllm, router.url)
