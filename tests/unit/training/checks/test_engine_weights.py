"""weights.engines: which section decides for an engine, what then holds for it, what is refused, and what users see."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rltool.config.engine_weights import EngineWeights
from rltool.config.loader import load_config
from rltool.config.rollout import WeightsConfig
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints
from rltool.engines.plugin.info import PLUGIN_PROTOCOL
from rltool.engines.types import EngineInfo
from rltool.errors import UsageError
from rltool.training.checks.preflight import ProbedFleet, backends, engine_problems
from rltool.training.checks.weight_routes import describe_routes, idle_rules
from rltool.training.cluster.listening import beyond_loopback
from rltool.weights.transport import choose_for

HERE = "http://127.0.0.1:8101"
FAR = "http://10.8.0.3:8102"
IPV6 = "http://[fd00::1]:8101"


def weights(*sections: dict, **settings) -> WeightsConfig:
    return WeightsConfig.model_validate({"engines": list(sections), **settings})


def load(tmp_path: Path, text: str = "", *sets: str) -> TrainConfig:
    (tmp_path / "run.toml").write_text(f'[model]\npath = "/m"\n{text}')
    return load_config(TrainConfig, [tmp_path / "run.toml"], sets).config


# -- which section decides


@pytest.mark.parametrize(
    ("match", "url", "fits"),
    [
        (HERE, HERE, True),
        ("127.0.0.1:8101", HERE, True),
        ("http://10.8.*", FAR, True),
        ("10.8.*", FAR, True),
        ("10.8.*", HERE, False),
        ("*:8102", FAR, True),
        ("*:8102", HERE, False),
        ("*:810[12]", HERE, True),
        ("*:810?", FAR, True),
        ("10.8", FAR, False),
        ("*fd00::1]:8101", IPV6, True),
        (IPV6, IPV6, True),
        ("[FD00::1]:8101", IPV6, True),
        ("[fd00::1]:8102", IPV6, False),
        ("[fd00::1]:8101", "http://f:8101", True),
        ("localhost:8101", HERE, False),
        ("Node7:*", "http://node7:8101", True),
        ("node7:*", "http://Node7:8101", True),
        ("https://*", "https://host:1", True),
        ("https://*", "http://host:1", False),
    ],
)
def test_a_pattern_is_of_the_address_with_its_scheme_or_without(match, url, fits):
    assert EngineWeights(match=match, staged=True).fits(url, "default") is fits


@pytest.mark.parametrize(
    ("section", "url", "group", "fits"),
    [
        ({"group": "far"}, HERE, "far", True),
        ({"group": "far"}, HERE, "default", False),
        ({"group": "far*"}, HERE, "far", False),
        ({"group": "far", "match": "10.8.*"}, FAR, "far", True),
        ({"group": "far", "match": "10.8.*"}, HERE, "far", False),
        ({"group": "far", "match": "10.8.*"}, FAR, "default", False),
    ],
)
def test_a_group_is_named_and_with_a_pattern_both_must_fit(section, url, group, fits):
    assert EngineWeights(**section, staged=True).fits(url, group) is fits


def test_the_first_section_that_fits_decides_and_what_it_leaves_out_is_as_in_weights():
    config = weights(
        {"match": "*:8102", "transport": "gloo"},
        {"match": "10.8.*", "transport": "disk", "staged": False},
        staged="auto",
        bucket_bytes=7,
    )
    first = config.of(FAR, "default")
    assert (first.transport, first.staged, first.bucket_bytes) == ("gloo", "auto", 7)
    second = config.of("http://10.8.0.3:8109", "default")
    assert (second.transport, second.staged) == ("disk", False)
    other = config.of(HERE, "default")
    assert (other.transport, other.staged, other.engines) == ("auto", "auto", ())
    assert config.rule_of(FAR, "default") is config.engines[0] and config.rule_of(HERE, "default") is None


def test_false_in_a_section_is_said_and_not_left_out():
    config = weights({"match": "10.8.*", "delta": False}, delta=True, transport="gloo")
    assert config.of(HERE, "default").delta is True and config.of(FAR, "default").delta is False


def test_what_holds_for_an_engine_is_sound_by_itself_and_has_a_store_where_it_takes_from_one():
    config = weights({"match": "10.8.*", "transport": "delta"}, {"group": "b", "staged": True}, store="/s")
    far, here = config.of(FAR, "default"), config.of(HERE, "b")
    assert (far.store, here.store) == ("/s", None)
    found = [each for _, each in config.variants()]
    assert found == [config.of(HERE, "default"), far, here]
    for each in found:
        assert WeightsConfig.model_validate(each.model_dump()) == each


# -- what is refused


@pytest.mark.parametrize(
    ("sections", "settings", "message"),
    [
        ([{"transport": "disk"}], {}, 'selects no engine.*match = "10.8.*" or group = "NAME"'),
        ([{"match": "", "transport": "disk"}], {}, "at least 1 character"),
        ([{"match": "a:*"}], {}, 'match = "a:\\*": sets nothing: give transport, staged or delta'),
        ([{"match": "a:*", "group": "b"}], {}, 'match = "a:\\*" and group = "b": sets nothing'),
        ([{"match": "a:*", "transport": "tcp"}], {}, "Input should be 'auto'"),
        ([{"match": "a:*", "store": "/x"}], {}, "Extra inputs are not permitted"),
        ([{"match": "a:*", "transport": "disk", "staged": True}], {}, 'with match = "a:\\*": staged has no effect'),
        ([{"match": "a:*", "transport": "disk"}], {"staged": True}, "staged has no effect.*set there what holds"),
        ([{"match": "a:*", "transport": "disk"}], {"staged": "auto"}, "staged has no effect"),
        ([{"group": "g", "delta": True}], {"staged": True}, 'group = "g": staged has no effect with delta'),
        ([{"match": "a:*", "delta": True, "staged": "auto"}], {}, "staged has no effect with delta"),
        ([{"match": "a:*", "transport": "disk", "delta": True}], {}, 'delta and transport = "disk" contradict'),
        ([{"match": "a:*", "transport": "ipc"}], {"delta": True}, 'delta and transport = "ipc" contradict'),
        ([{"match": "a:*", "transport": "delta"}], {"delta": True, "store": "/s"}, 'transport = "delta" contradict'),
        ([{"match": "a:*", "transport": "delta"}], {}, '"delta", here or in engines, and store go together'),
        ([{"match": "a:*", "transport": "disk"}], {"store": "/s"}, "and store go together"),
        ([], {"store": "/s"}, "and store go together"),
        ([], {"transport": "delta"}, "and store go together"),
        ([{"match": "a", "staged": True}, {"match": "A", "delta": True}], {}, 'match = "A".* would never decide'),
        ([{"group": "g", "staged": True}, {"group": "g", "delta": True}], {}, "would never decide"),
        (
            [{"match": "a", "delta": True}, {"match": "*", "delta": False}, {"group": "g", "staged": True}], {},
            r'group = "g".* would never decide, for that with match = "\*" comes before it',
        ),
        ([{"match": "**", "staged": True}, {"match": "*", "delta": True}], {}, "would never decide"),
        ([{"match": "a", "staged": True}, {"match": "a", "group": "g", "delta": True}], {}, "would never decide"),
        ([{"group": "g", "staged": True}, {"match": "a", "group": "g", "delta": True}], {}, "would never decide"),
    ],
)
def test_a_section_that_cannot_work_is_refused_as_weights_itself_is(sections, settings, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        weights(*sections, **settings)


@pytest.mark.parametrize(
    ("sections", "settings"),
    [
        ([{"match": "a:*", "transport": "disk", "staged": False}], {"staged": True}),
        ([{"match": "a:*", "transport": "delta", "delta": False}], {"delta": True, "store": "/s"}),
        ([{"match": "a:*", "transport": "gloo", "staged": True}], {"transport": "delta", "store": "/s"}),
        ([{"match": "a:*", "transport": "auto"}, {"match": "*", "transport": "disk"}], {}),
        ([{"match": "a", "group": "g", "delta": True}, {"match": "a", "staged": True}], {}),
        ([{"match": "*", "group": "g", "delta": True}, {"match": "a", "staged": True}], {}),
        ([{"group": "g", "delta": True}, {"match": "a", "group": "h", "delta": True}], {}),
        ([{"match": "*:1", "delta": True}, {"match": "a:1", "staged": True}], {}),
    ],
)
def test_a_section_may_say_otherwise(sections, settings):
    weights(*sections, **settings)


@pytest.mark.parametrize(
    ("mode", "section", "message"),
    [
        ("colocate", {"staged": True}, r'weights.engines \(group = "g"\): staged and engines.mode = "colocate"'),
        ("colocate", {"delta": "auto"}, r"weights.engines .*: delta and engines.mode"),
        ("colocate", {"transport": "nccl"}, r'weights.engines .*: transport = "nccl" and engines.mode'),
        ("colocate", {"transport": "ipc"}, r'weights.engines .*: transport = "ipc" and trainer.device = "cpu"'),
        ("managed", {"transport": "ipc"}, r'weights.engines .*: transport = "ipc" and engines.mode = "managed"'),
    ],
)
def test_what_contradicts_the_mode_of_the_engines_is_refused_in_a_section_too(mode, section, message):
    values = {
        "model": {"path": "/m"},
        "engines": {"mode": mode, "groups": [{"name": "g"}]},
        "trainer": {"device": "cpu"},
        "weights": {"engines": [{"group": "g", **section}]},
    }
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate(values)


def test_a_section_without_nccl_leaves_no_listener_out_and_one_with_it_is_named():
    def said(**settings):
        config = TrainConfig.model_validate({"model": {"path": "m"}, "weights": settings})
        return list(beyond_loopback(config, "cuda", sends=True))

    assert said(transport="gloo") == []
    [line] = said(transport="gloo", engines=[{"match": "10.8.*", "transport": "nccl"}])
    assert "NCCL towards the engines" in line


# -- where it is written


def test_sections_come_from_toml_in_their_order_and_from_set(tmp_path):
    text = """
[weights]
store = "s3://bucket/prefix"
[[weights.engines]]
match = "10.8.*"
transport = "delta"
[[weights.engines]]
group = "near"
staged = "auto"
"""
    config = load(tmp_path, text).weights
    assert [rule.whom for rule in config.engines] == ['match = "10.8.*"', 'group = "near"']
    assert (config.of(FAR, "near").transport, config.of(HERE, "near").staged) == ("delta", "auto")
    sets = 'weights.engines=[{match="*:8101", staged=true}]', 'weights.store="/s"', 'weights.transport="delta"'
    replaced = load(tmp_path, text, *sets, 'weights.engines=[{match="*:8101", transport="gloo"}]').weights
    assert [rule.settings for rule in replaced.engines] == [{"transport": "gloo"}], "as every list, as a whole"
    assert load(tmp_path, text).weights == WeightsConfig.model_validate(config.model_dump(mode="json"))


def test_a_misspelt_key_of_a_section_is_named_with_its_place(tmp_path):
    with pytest.raises(UsageError, match=r"unknown key 'weights.engines.0.transprt'.*did you mean transport\?"):
        load(tmp_path, '[[weights.engines]]\nmatch = "a"\ntransprt = "disk"\n')
    with pytest.raises(UsageError, match=r"weights.engines.1: match = \"b\": sets nothing"):
        load(tmp_path, '[[weights.engines]]\nmatch = "a"\nstaged = true\n[[weights.engines]]\nmatch = "b"\n')


def test_the_example_of_the_documentation_is_sound(tmp_path):
    page = (Path(__file__).parents[4] / "docs/weights.md").read_text()
    part = page[page.index("## A transport per engine") :]
    lines = part[part.index("    [weights]") :].splitlines()
    example = "\n".join(line.strip() for line in lines[: next(i for i, line in enumerate(lines) if line[:1].strip())])
    assert len(tomllib.loads(example)["weights"]["engines"]) >= 2
    load(tmp_path, example)


# -- what is chosen, and shown


def info(**changes) -> EngineInfo:
    values = dict(
        dialect="vllm", engine_version="0.32.0", model_id="policy", world_size=1, max_model_len=4096, vocab_size=128,
        dtype="float32", weight_backend="rltool", weight_version=None, boot_id="b", plugin=True, device="cpu",
        plugin_protocol=PLUGIN_PROTOCOL,
    )  # fmt: skip
    return EngineInfo(**{**values, **changes})


def engine(url: str, **facts) -> EngineEndpoint:
    return EngineEndpoint(url=url, dialect="vllm", **facts)


def probed(*engines: EngineEndpoint, absent: tuple[EngineEndpoint, ...] = (), **infos: EngineInfo) -> ProbedFleet:
    endpoints = ModelEndpoints(engines=engines)
    return ProbedFleet(endpoints, {e.url: infos.get(e.group, info()) for e in engines}, {e: "down" for e in absent})


def with_weights(config: WeightsConfig) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": "/m"}, "weights": config.model_dump()})


FLEET = probed(engine(HERE), engine(FAR), engine("http://127.0.0.1:8103", group="slow"))
SECTIONS = ({"match": "10.8.*", "transport": "delta"}, {"group": "slow", "transport": "disk"})


def test_each_engine_is_chosen_for_by_its_own_section():
    config = with_weights(weights(*SECTIONS, store="/s"))
    assert backends(FLEET, config, "cpu") == {HERE: "gloo", FAR: "delta", "http://127.0.0.1:8103": "disk"}


def test_one_that_cannot_is_refused_and_the_section_that_decides_is_named():
    stock = info(weight_backend="nccl", plugin=False, device="cuda")
    config = weights({"match": "10.8.*", "transport": "delta"}, store="/s")
    decides = r'cannot fetch deltas.*\(for this engine \[\[weights.engines\]\] with match = "10.8.\*" decides\)'
    with pytest.raises(UsageError, match=decides):
        choose_for(engine(FAR), stock, config, "cuda")
    assert choose_for(engine(HERE), stock, config, "cuda") == "vllm-nccl"
    with pytest.raises(UsageError, match=r"cannot send to: start it with[^(]*$"):
        choose_for(engine(HERE), stock, config, "cpu")


def test_the_preflight_says_so_of_each_engine():
    config = with_weights(weights({"match": "10.8.*", "transport": "disk"}))
    stock, model = info(weight_backend="nccl", device="cuda"), {"vocab_size": 128}
    [problem] = engine_problems(engine(FAR), stock, model, config, "cuda")
    assert "cannot load weights from disk" in problem and '[[weights.engines]] with match = "10.8.*"' in problem
    assert not engine_problems(engine(HERE), stock, model, config, "cuda")


def test_the_transports_are_counted_without_sections_and_named_with_them():
    plain = with_weights(weights())
    assert describe_routes([FLEET], plain, "cpu") == "weights over gloo"
    on_a_gpu = probed(engine(HERE), engine(FAR, group="gpu"), gpu=info(device="cuda"))
    assert describe_routes([on_a_gpu], plain, "cuda") == "weights over gloo (1), nccl (1)"
    config = with_weights(weights(*SECTIONS, store="/s", staged=False))
    evaluation = probed(engine("http://10.8.0.9:1"))
    assert describe_routes([FLEET, evaluation], config, "cpu") == (
        f"weights over gloo: {HERE}; delta: {FAR}, http://10.8.0.9:1; disk: http://127.0.0.1:8103"
    )
    staged = with_weights(weights({"match": "10.8.*", "staged": True}))
    assert describe_routes([FLEET], staged, "cpu").endswith(f"; gloo, staged: {FAR}")


def test_a_section_that_decides_for_nobody_is_told():
    config = weights(
        *SECTIONS,
        {"match": "10.8.0.3:*", "staged": True},
        {"match": "*:9999", "staged": True},
        {"match": "*:7", "delta": True},
        store="/s",
    )
    fleet = probed(*FLEET.endpoints.engines, absent=(engine("http://h:7"),))
    first, second = idle_rules([fleet], config)
    assert 'match = "10.8.0.3:*" decides for none of the run\'s engines' in first
    assert 'for those that it fits an earlier one does, with match = "10.8.*"; it will' in first
    assert 'match = "*:9999" decides for none' in second and "an earlier one does" not in second
    frozen = probed(engine("http://h:9999", takes_weights=False))
    assert len(idle_rules([fleet, frozen], config)) == 2, "it is sent no weights"
    assert len(idle_rules([fleet, probed(engine("http://h:9999"))], config)) == 1
    assert idle_rules([FLEET], weights()) == []
