"""Addresses and endpoints.json."""

import json
import os
import re

import pytest

from rltool.engines.endpoints import Address, Endpoints, EngineEndpoint, ModelEndpoints, parse_address, resolve
from rltool.errors import UsageError


def fleet(*urls, **changes):
    return Endpoints(
        models={"policy": ModelEndpoints(engines=tuple(EngineEndpoint(url=url) for url in urls), **changes)}
    )


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://node-3:8000", "http://node-3:8000"),
        ("https://node-3:443/", "https://node-3:443"),
        (" localhost:1 ", "http://localhost:1"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("http://[fe80::2]:9", "http://[fe80::2]:9"),
    ],
)
def test_an_address_becomes_a_url(text, url):
    assert parse_address(text) == (Address(url=url),)


def test_a_list_is_separated_by_commas(tmp_path):
    first, second, third = parse_address(f"a:1, b:2,@{tmp_path}/endpoints.json")
    assert (first.url, second.url, third.file) == ("http://a:1", "http://b:2", tmp_path / "endpoints.json")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("host", "no port"),
        ("host:0", "no port"),
        ("host:", "no port"),
        ("host:http", "Port"),
        ("host:70000", "Port out of range"),
        (":8000", "no host"),
        ("::1:8000", "Port"),
        ("[::1:8000", "Invalid IPv6"),
        ("[zz]:8000", "IP"),
        ("ftp://a:1", "not http or https"),
        ("http://a:1/generate", "nothing may follow the port"),
        ("http://key@a:1", "keys do not belong into an address"),
        ("a b:1", "space"),
        ("@", "no file"),
        ("a:1,,b:2", "empty"),
    ],
)
def test_a_malformed_address_is_quoted_with_the_expected_form(text, reason):
    with pytest.raises(UsageError, match=r"expected HOST:PORT") as caught:
        parse_address(text)
    assert reason in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("path", ["runs/x/endpoints.json", "/tmp/e", "./e", "~/e", "endpoints.json", "../x/e.json"])
def test_a_path_without_the_at_sign_is_refused_with_that_hint(path):
    with pytest.raises(UsageError, match="this is a path, and a file is named with @ before it: @" + re.escape(path)):
        parse_address(f"a:1,{path}")


def test_what_was_saved_is_what_is_loaded(tmp_path):
    key = tmp_path / "state" / "key"
    engine = EngineEndpoint(
        url="http://127.0.0.1:1", dialect="vllm", gpus=(0, 1), tp=2, plugin=True, boot_id="b", key_file=key
    )
    endpoints = Endpoints(models={"policy": ModelEndpoints(data_url="http://127.0.0.1:2", engines=(engine,))})
    endpoints.save(tmp_path / "endpoints.json")
    assert Endpoints.load(tmp_path / "endpoints.json") == endpoints
    assert os.listdir(tmp_path) == ["endpoints.json"]  # no temporary file is left


def test_key_files_in_the_file_are_relative_to_it_so_that_the_directory_can_move(tmp_path):
    (tmp_path / "run" / "state").mkdir(parents=True)
    (tmp_path / "run" / "state" / "key").write_text("secret\n")
    engine = EngineEndpoint(url="http://127.0.0.1:1", key_file=tmp_path / "run" / "state" / "key")
    Endpoints(models={"policy": ModelEndpoints(engines=(engine,))}).save(tmp_path / "run" / "endpoints.json")
    text = json.loads((tmp_path / "run" / "endpoints.json").read_text())
    assert text["models"]["policy"]["engines"][0]["key_file"] == "state/key"
    (tmp_path / "run").rename(tmp_path / "moved")
    loaded = Endpoints.load(tmp_path / "moved" / "endpoints.json")
    assert loaded.models["policy"].engines[0].read_key() == "secret"


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "endpoints.json"
    fleet("http://a:1").save(path)

    def full(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        fleet("http://b:2").save(path)
    assert Endpoints.load(path) == fleet("http://a:1")
    assert os.listdir(tmp_path) == ["endpoints.json"]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"version": 2}', '{"version": 1, "models": {"m": {"engines": [{}]}}}', '{"version": 1, "modles": {}}'],
)
def test_a_file_of_another_form_is_refused_by_name(tmp_path, text):
    path = tmp_path / "endpoints.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="endpoints.json is not an endpoints file"):
        Endpoints.load(path)


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*endpoints.json"):
        resolve([f"@{tmp_path}/endpoints.json"])


def test_files_and_addresses_resolve_into_one_fleet(tmp_path):
    fleet("http://a:1", "http://b:2", data_url="http://r:3").save(tmp_path / "endpoints.json")
    found = resolve([f"@{tmp_path}/endpoints.json", "c:4"])
    assert [engine.url for engine in found.engines] == ["http://a:1", "http://b:2", "http://c:4"]
    assert found.data_url == "http://r:3"
    assert found.engines[2].dialect is None


def test_an_engine_named_twice_is_refused(tmp_path):
    fleet("http://a:1").save(tmp_path / "endpoints.json")
    with pytest.raises(UsageError, match=r"named twice: http://a:1"):
        resolve([f"@{tmp_path}/endpoints.json,a:1"])


def test_two_routers_for_one_model_are_refused(tmp_path):
    for name in ("one", "two"):
        fleet(f"http://{name}:1", data_url=f"http://router-{name}:1").save(tmp_path / name)
    with pytest.raises(UsageError, match="different routers"):
        resolve([f"@{tmp_path}/one", f"@{tmp_path}/two"])


def test_a_file_with_several_models_needs_the_right_name(tmp_path):
    engines = (EngineEndpoint(url="http://a:1"),)
    Endpoints(models={"judge": ModelEndpoints(engines=engines), "draft": ModelEndpoints(engines=engines)}).save(
        tmp_path / "e"
    )
    with pytest.raises(UsageError, match="no model 'policy', only draft, judge"):
        resolve([f"@{tmp_path}/e"])
    assert resolve([f"@{tmp_path}/e"], model="judge").engines == engines


def test_engines_of_a_model_that_is_not_updated_take_no_weights_and_others_beside_them_do(tmp_path):
    fleet("http://judge:1", update_weights=False).save(tmp_path / "judge")
    fleet("http://a:1").save(tmp_path / "policy")
    assert {e.url: e.takes_weights for e in resolve([f"@{tmp_path}/judge"]).engines} == {"http://judge:1": False}
    mixed = resolve([f"@{tmp_path}/policy", f"@{tmp_path}/judge", "b:2"])
    takes = {engine.url: engine.takes_weights for engine in mixed.engines}
    assert takes == {"http://a:1": True, "http://judge:1": False, "http://b:2": True}
    assert mixed.update_weights and not resolve([f"@{tmp_path}/judge"]).update_weights


def test_one_engine_of_a_model_may_be_left_alone(tmp_path):
    engines = [{"url": "http://a:1", "takes_weights": False}, {"url": "http://b:2"}]
    (tmp_path / "e").write_text(json.dumps({"version": 1, "models": {"policy": {"engines": engines}}}))
    assert [engine.takes_weights for engine in resolve([f"@{tmp_path}/e"]).engines] == [False, True]


def test_reading_and_saving_a_file_changes_nothing_in_it(tmp_path):
    fleet("http://judge:1", update_weights=False).save(tmp_path / "e")
    before = (tmp_path / "e").read_text()
    Endpoints.load(tmp_path / "e").save(tmp_path / "e")
    assert (tmp_path / "e").read_text() == before


def test_nothing_typed_is_refused():
    with pytest.raises(UsageError, match="no engine address was given"):
        resolve([])


def test_the_router_is_addressed_with_the_key_of_its_engines(tmp_path):
    model = ModelEndpoints(
        data_url="http://r:1", engines=(EngineEndpoint(url="http://a:1", key_file=tmp_path / "key"),)
    )
    router = model.data_endpoint()
    assert (router.url, router.dialect, router.key_file) == ("http://r:1", "sglang", tmp_path / "key")
    assert ModelEndpoints().data_endpoint() is None


@pytest.mark.parametrize(
    ("engines", "plugin"),
    [((), False), (("vllm", "vllm"), True), (("vllm", "sglang"), False), (("vllm", "stock"), False), ((None,), False)],
)
def test_a_router_to_nothing_but_vllm_with_the_plugin_is_known_as_one(engines, plugin):
    behind = [
        EngineEndpoint(url="http://a:1", dialect=kind and kind.replace("stock", "vllm"), plugin=kind == "vllm")
        for kind in engines
    ]
    assert ModelEndpoints(data_url="http://r:1", engines=tuple(behind)).data_endpoint().plugin is plugin


def test_a_key_that_cannot_be_read_or_is_empty_names_its_file(tmp_path):
    engine = EngineEndpoint(url="http://a:1", key_file=tmp_path / "key")
    with pytest.raises(UsageError, match="cannot read the key file"):
        engine.read_key()
    (tmp_path / "key").write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        engine.read_key()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\ntwo\n", "has 2 lines"),
        (b"one\x85two", "is not text"),
        ("one\u2028two".encode(), "has 2 lines"),
        (b"\xff\xfe", "is not text"),
        (b"two words", "one word of printable ASCII"),
        ("schl\u00fcssel".encode(), "one word of printable ASCII"),
        (b"a\0b", "one word of printable ASCII"),
    ],
)
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(tmp_path, content, message):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        EngineEndpoint(url="http://a:1", key_file=tmp_path / "key").read_key()
    assert str(tmp_path / "key") in str(error.value) and "http://a:1" in str(error.value)
    assert "two" not in str(error.value)


def test_a_key_may_end_in_a_line_end(tmp_path):
    (tmp_path / "key").write_bytes(b"  sEcReT-1_2.3\r\n")
    assert EngineEndpoint(url="http://a:1", key_file=tmp_path / "key").read_key() == "sEcReT-1_2.3"


def test_an_endpoints_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "endpoints.json").write_bytes(b'{"models": "\xff"}')
    with pytest.raises(UsageError, match="is not an endpoints file"):
        Endpoints.load(tmp_path / "endpoints.json")
