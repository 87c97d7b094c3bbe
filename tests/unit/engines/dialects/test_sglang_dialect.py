"""The SGLang dialect: what is sent, and how replies are read. The shapes were recorded from the real 0.5.23
(tests/e2e/test_sglang.py)."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rltool.config.serve import EngineLaunch
from rltool.engines.dialects.sglang import SglangDialect, parse_reply
from rltool.engines.dialects.sglang_launch import LAUNCHER
from rltool.engines.types import (
    Drafts,
    EngineLoad,
    GenerateRequest,
    Picture,
    Routing,
    SamplingParams,
    TokenStream,
    VersionSpan,
)
from rltool.errors import EngineError, EngineFailed, EngineRejected, MissingLogprobs, PicturesDiffer, UsageError
from rltool.weights.transport import transport

SPEAKS = SglangDialect()
RID = "0123456789abcdef" * 2

REPLY = {
    "text": "cde",
    "output_ids": [70, 71, 1],
    "meta_info": {
        "id": RID,
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": 4,
        "weight_version": "run:0:2",
        "output_token_logprobs": [[-0.5, 70, None], [-1.25, 71, None], [-0.125, 1, None]],
        "completion_tokens": 3,
        "weight_versions": [{"version": "run:0:1", "start": 0, "end": 2}, {"version": "run:0:2", "start": 2, "end": 3}],
    },
}

PROBE = {
    "model": {
        "model_path": "/models/tiny",
        "served_model_name": "policy",
        "weight_version": "run:0:2",
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
    },
    "models": {"data": [{"id": "policy", "max_model_len": 512}]},
    "server": {
        "version": "0.5.23",
        "served_model_name": "policy",
        "tp_size": 2,
        "pp_size": 1,
        "dp_size": 3,
        "enable_dp_attention": False,
        "dtype": "float32",
        "weight_version": f"boot-{RID}",
        "startup_time": {"load_weight": 0.023432086000184427, "scheduler_e2e": 1.6780892570000105},
    },
    "ready": None,
}


def request(n: int = 1, seed: int | None = 7, **sampling) -> GenerateRequest:
    return GenerateRequest((5, 6, 7, 8), SamplingParams(16, **sampling), RID, n=n, seed=seed)


def reply(**meta) -> dict:
    changed = copy.deepcopy(REPLY)
    changed["meta_info"].update(meta)
    return changed


def probed(**server):
    return SPEAKS.parse_probe(PROBE | {"server": PROBE["server"] | server})


def launch(tmp_path: Path, **changes) -> EngineLaunch:
    fields = {
        "index": 1, "model": Path("/models/tiny"), "host": "127.0.0.1", "port": 8102, "gpus": (2, 3), "tp": 2,
        "device": "cuda", "served_name": "policy",
        "dtype": None, "max_model_len": 4096, "seed": 41, "trust_remote_code": False,
        "python": Path("/envs/sglang/bin/python"), "key_file": tmp_path / "key",
        "boot_id": RID, "weight_backend": "nccl", "work_dir": tmp_path,
    }  # fmt: skip
    return EngineLaunch(**fields | changes)


def option(argv: list[str], name: str) -> str:
    assert argv.count(name) == 1
    return argv[argv.index(name) + 1]


# -- generation


def test_a_request_has_token_ids_and_no_text_and_asks_for_logprobs():
    (http,) = SPEAKS.generate(request(temperature=0.7, top_p=0.9, top_k=20, stop_token_ids=(1, 2)))
    assert (http.method, http.path) == ("POST", "/generate")
    assert http.body == {
        "rid": RID,
        "input_ids": [5, 6, 7, 8],
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 16,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "stop_token_ids": [1, 2],
            "ignore_eos": False,
            "sampling_seed": 7,
        },
    }


def test_ignoring_the_end_is_passed_on_but_not_together_with_stop_tokens_which_it_would_ignore_too():
    (http,) = SPEAKS.generate(request(ignore_eos=True))
    assert http.body["sampling_params"]["ignore_eos"] is True
    with pytest.raises(UsageError, match="no token at all under ignore_eos"):
        SPEAKS.generate(request(ignore_eos=True, stop_token_ids=(1,)))


def seeing(n: int = 1) -> GenerateRequest:
    pictures = (Picture(1, 2, "data:A"), Picture(4, 3, "data:B"))
    return replace(request(n), prompt_ids=(5, 9, 9, 6, 9, 9, 9, 7), pictures=pictures)


def test_a_prompt_with_pictures_goes_with_a_placeholder_for_each_and_is_compared_with_what_became_of_it():
    sent = SPEAKS.generate(seeing(2))
    assert [http.body["input_ids"] for http in sent] == [[5, 9, 6, 9, 7]] * 2
    assert [http.body["image_data"] for http in sent] == [["data:A", "data:B"]] * 2
    assert all(http.body["return_prompt_token_ids"] for http in sent)
    assert not {"image_data", "return_prompt_token_ids"} & SPEAKS.generate(request())[0].body.keys()
    own = [5, 9, 9, 6, 9, 9, 9, 7]
    right, wrong = (reply() | {"prompt_token_ids": ids} for ids in (own, [*own[:-1], 9, 7]))
    assert len(SPEAKS.parse_generate(seeing(2), [right, [right]])) == 2
    with pytest.raises(PicturesDiffer, match="a prompt with 2 pictures to 9 tokens, the trainer's 8"):
        SPEAKS.parse_generate(seeing(2), [right, wrong])
    with pytest.raises(PicturesDiffer, match="does not say to which tokens .* or a router before it"):
        SPEAKS.parse_generate(seeing(2), [right, reply()])


def test_every_sample_is_a_request_of_its_own_with_its_own_seed():
    sent = SPEAKS.generate(request(n=3))
    assert [http.body["sampling_params"]["sampling_seed"] for http in sent] == [7, 8, 9]
    assert all("n" not in http.body["sampling_params"] for http in sent)


def test_seeds_wrap_around_below_two_to_the_31():
    sent = SPEAKS.generate(request(n=2, seed=2**31 - 1))
    assert [http.body["sampling_params"]["sampling_seed"] for http in sent] == [2**31 - 1, 0]


def test_without_a_seed_none_is_sent():
    assert all("sampling_seed" not in http.body["sampling_params"] for http in SPEAKS.generate(request(n=2, seed=None)))


def test_no_request_id_is_a_prefix_of_another_for_aborts_match_prefixes():
    ids = [http.body["rid"] for http in SPEAKS.generate(request(n=120))]
    assert len(set(ids)) == 120
    assert not any(a != b and b.startswith(a) for a in ids for b in ids)
    assert all(rid.startswith(RID) for rid in ids)


@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_is_a_request_for_each_sample_with_its_whole_id(n):
    ids = SPEAKS.request_ids(request(n=n))
    assert ids == [http.body["rid"] for http in SPEAKS.generate(request(n=n))]
    aborts = SPEAKS.abort(ids)
    assert {(http.method, http.path) for http in aborts} == {("POST", "/abort_request")}
    assert [http.body for http in aborts] == [{"rid": rid} for rid in ids]


def test_an_empty_id_is_never_sent_for_it_is_a_prefix_of_all():
    with pytest.raises(ValueError, match="every client"):
        SPEAKS.abort([RID, ""])
    assert SPEAKS.abort([]) == []


def test_a_reply_becomes_a_completion_with_its_spans():
    completion = parse_reply(REPLY)
    assert completion.token_ids == (70, 71, 1)
    assert completion.logprobs == (-0.5, -1.25, -0.125)
    assert completion.finish_reason == "stop"
    assert completion.versions == (VersionSpan("run:0:1", 0, 2), VersionSpan("run:0:2", 2, 3))


def test_a_reply_without_spans_is_of_its_one_version():
    assert parse_reply(reply(weight_versions=None)).versions == (VersionSpan("run:0:2", 0, 3),)


def test_a_reply_of_a_server_that_names_no_version_has_no_spans():
    assert parse_reply(reply(weight_versions=None, weight_version=None)).versions == ()


@pytest.mark.parametrize("name", ["spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"])
def test_accepted_drafts_have_had_several_names(name):
    found = parse_reply(reply(spec_verify_ct=4, cached_tokens=3, **{name: 6}))
    assert (found.drafts, found.cached_tokens) == (Drafts(passes=4, accepted=6), 3)
    assert parse_reply(reply()).drafts is None


def test_an_aborted_request_keeps_its_partial_tokens():
    completion = parse_reply(reply(finish_reason={"type": "abort", "message": "Aborted"}))
    assert completion.finish_reason == "abort" and len(completion.token_ids) == 3


def test_an_abort_before_the_first_token_is_an_empty_completion():
    empty = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "default"}}
    assert parse_reply(empty).token_ids == () and parse_reply(empty).versions == ()


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [],
        [[-0.5, 70, None]],
        [[None, 70, None], [-1.0, 71, None], [-1.0, 1, None]],
        [[float("nan"), 70, None], [-1.0, 71, None], [-1.0, 1, None]],
    ],
    ids=["absent", "empty", "too few", "null", "nan"],
)
def test_a_missing_logprob_is_an_error(entries):
    with pytest.raises(MissingLogprobs):
        parse_reply(reply(output_token_logprobs=entries))


def test_a_logprob_of_another_token_is_an_error():
    with pytest.raises(EngineError, match="that of token 99"):
        parse_reply(reply(output_token_logprobs=[[-0.5, 70, None], [-1.0, 99, None], [-1.0, 1, None]]))


@pytest.mark.parametrize("reason", [None, {"type": "tool_calls"}])
def test_an_unknown_finish_reason_is_an_error(reason):
    with pytest.raises(EngineError, match="finish_reason"):
        parse_reply(reply(finish_reason=reason))


@pytest.mark.parametrize("text", ["hello", [], {"text": "hello"}, [REPLY, REPLY], None])
def test_a_reply_of_another_shape_is_an_error(text):
    with pytest.raises(EngineError, match="without output_ids"):
        parse_reply(text)


def test_as_many_samples_as_asked_for_or_an_error():
    assert len(SPEAKS.parse_generate(request(n=2), [REPLY, [REPLY]])) == 2
    with pytest.raises(EngineError, match="1 replies where 2"):
        SPEAKS.parse_generate(request(n=2), [REPLY])


def events(*sizes, cumulative, version="run:0:2"):
    """Of a stream of REPLY, with so many tokens by the end of each."""
    found, before = [], 0
    for size in sizes:
        event = reply(completion_tokens=size, weight_version=version)
        meta, shown = event["meta_info"], slice(0 if cumulative else before, size)
        event["output_ids"], before = event["output_ids"][shown], size
        meta["output_token_logprobs"] = meta["output_token_logprobs"][shown]
        if size < 3:
            meta["finish_reason"] = meta.pop("weight_versions") and None
        found.append(event)
    return found


def taken(given):
    stream = TokenStream(lambda piece: None)
    for event in given:
        stream.take(SPEAKS.parse_event(request(), event, stream))
    return stream.completion()


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("sizes", [(3,), (1, 2, 3), (2, 2, 3), (1, 3, 3)])
def test_a_stream_brings_each_token_once(cumulative, sizes):
    assert taken(events(*sizes, cumulative=cumulative)) == parse_reply(REPLY)


def test_the_last_token_that_an_abort_in_the_queue_says_again_counts_once():
    *begun, end = events(1, 2, 3, cumulative=False)
    end |= {"output_ids": [71], "meta_info": end["meta_info"] | {"completion_tokens": 2}}
    end["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
    found = taken([*begun, end])
    assert (found.token_ids, found.finish_reason) == ((70, 71), "abort")


def test_versions_of_a_stream_are_known_until_the_weights_change_and_at_its_end():
    one, two, three = events(1, 2, 3, cumulative=False)
    one["meta_info"]["weight_version"] = "run:0:1"
    assert taken([one]).versions == (VersionSpan("run:0:1", 0, 1),)
    assert taken([one, two]).versions == (VersionSpan("run:0:1", 0, 1),)  # the second may be of either
    assert taken([one, two, three]).versions == parse_reply(REPLY).versions


def test_events_that_do_not_fit_what_came_are_errors():
    one, two, _ = events(1, 2, 3, cumulative=True)
    for wrong in (two | {"output_ids": [99, 71]}, two | {"output_ids": [70, 71, 1, 1]}, events(1, cumulative=False)[0]):
        with pytest.raises(EngineError):
            taken([one, two, wrong])
    with pytest.raises(MissingLogprobs):
        taken([reply(output_token_logprobs=[[-0.5, 70, None]])])


@pytest.mark.parametrize(("code", "begun", "kind"), [
    (400, False, EngineRejected), (400, True, EngineFailed), (429, False, EngineFailed), (500, False, EngineFailed),
])  # fmt: skip
def test_a_refusal_within_a_stream_is_one_as_long_as_nothing_has_come(code, begun, kind):
    aborted = reply(finish_reason={"type": "abort", "message": "too long", "status_code": code}, completion_tokens=1)
    for event in {"error": {"message": "too long", "code": code}}, aborted | {"output_ids": [70]}:
        with pytest.raises(kind, match="too long"):
            taken([*events(1, cumulative=False), event] if begun else [event])


def test_what_is_streamed_is_one_sample_and_no_routed_experts():
    [http] = SPEAKS.generate(request())
    assert SPEAKS.stream(request()).body == http.body | {"stream": True}
    assert SPEAKS.stream(request(n=2)) is None
    assert SPEAKS.stream(replace(request(), routing=Routing(layers=1, top_k=1, experts=2))) is None


# -- probing


def test_a_probe_tells_what_sglang_tells():
    info = probed()
    assert (info.dialect, info.engine_version, info.model_id, info.dtype) == ("sglang", "0.5.23", "policy", "float32")
    assert (info.world_size, info.max_model_len, info.vocab_size) == (6, 512, None)
    assert (info.weight_version, info.boot_id, info.plugin, info.paused) == ("run:0:2", RID, False, False)


def test_with_attention_data_parallelism_the_replicas_share_the_tensor_parallel_ranks():
    assert probed(enable_dp_attention=True).world_size == 2


def test_the_model_keeps_its_name_after_a_load_from_disk_has_renamed_it():
    model = PROBE["model"] | {"served_model_name": "/weights/v7", "model_path": "/weights/v7"}
    assert SPEAKS.parse_probe(PROBE | {"model": model}).model_id == "policy"


def test_a_server_that_is_not_ready_but_answers_is_paused():
    assert SPEAKS.parse_probe(PROBE | {"ready": 503}).paused is True
    assert 503 in SPEAKS.probe()["ready"].tolerate


def test_a_server_before_0_5_20_which_has_no_ready_route_does_not_tell_whether_it_is_paused():
    assert SPEAKS.parse_probe(PROBE | {"ready": 404}).paused is None
    assert 404 in SPEAKS.probe()["ready"].tolerate and SPEAKS.health().tolerate == (404,)


def test_the_update_session_of_0_5_21_is_left_out_by_a_server_that_has_none():
    session = {"/begin_weight_update", "/end_weight_update"}
    control = transport("sglang", "gloo").control
    sent = [*control.begin(), *control.finish("v"), *control.leave("g")]
    assert all((404 in http.tolerate) == (http.path in session) for http in sent)


def test_a_0_5_17_which_forgets_the_version_of_its_start_is_known_by_its_start_times():
    first, synced = (probed(version="0.5.17", weight_version=told) for told in (f"boot-{RID}", "run:0:1"))
    assert first.boot_id == synced.boot_id not in (RID, None)


def test_a_server_started_by_others_has_a_boot_id_of_its_start_times():
    first = probed(weight_version="default")
    again = probed(weight_version="default")
    restarted = probed(weight_version="default", startup_time={"load_weight": 0.0234320860001844, "scheduler_e2e": 1.6})
    assert first.boot_id == again.boot_id != restarted.boot_id
    assert probed(weight_version="default", startup_time=None).boot_id is None


def test_a_server_of_another_kind_is_refused():
    with pytest.raises(EngineError, match="not SGLang's"):
        SPEAKS.parse_probe(PROBE | {"server": {"version": "0.32.0"}})


def loads(**changes):
    """What a 0.5.23 with two requests of four samples in all answered, cut to what is of interest, and one that
    waits."""
    load = {
        "timestamp": 1795288903.03, "dp_rank": 0, "num_running_reqs": 4, "num_waiting_reqs": 1,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": 64, "num_total_tokens": 64, "max_total_num_tokens": 32768, "max_running_requests": 4096,
        "token_usage": 0.002,
        "gen_throughput": 0.0, "decode_moments": [13.0, 52.0],
    }  # fmt: skip
    return {
        "timestamp": "2026-11-21T19:21:43+00:00",
        "version": "0.5.23",
        "accelerator": None,
        "loads": [load | changes],
    }


def test_the_load_is_read_from_the_core_section_of_v1_loads():
    http = SPEAKS.load()
    assert (http.method, http.path, http.query) == ("GET", "/v1/loads", {"include": "core"})
    assert SPEAKS.parse_load(loads()) == EngineLoad(4, 1, 0.002)


def test_the_load_of_data_parallel_ranks_is_their_sum_and_the_fullest_cache():
    ranks = [*loads()["loads"], *loads(dp_rank=1, num_running_reqs=7, num_waiting_reqs=0, token_usage=0.4)["loads"]]
    assert SPEAKS.parse_load(loads() | {"loads": ranks}) == EngineLoad(11, 1, 0.4)


@pytest.mark.parametrize("reply", [None, "text", {}, {"loads": []}])
def test_a_load_that_tells_nothing_is_an_error_and_not_an_idle_engine(reply):
    with pytest.raises(EngineError, match="/v1/loads"):
        SPEAKS.parse_load(reply)


def test_health_is_the_route_that_generates_nothing():
    assert SPEAKS.health().path == "/ready"


# -- control plane


def test_keeping_requests_over_a_pause_means_that_their_cache_is_recomputed():
    assert [(http.path, http.body) for http in SPEAKS.pause("keep")] == [("/pause_generation", {"mode": "retract"})]


def test_aborting_waits_until_the_last_batch_is_gone():
    assert [(http.path, http.body, http.query) for http in SPEAKS.pause("abort")] == [
        ("/pause_generation", {"mode": "abort"}, {}),
        ("/flush_cache", None, {"timeout": "30"}),
    ]


def test_waiting_is_refused_with_the_alternatives():
    with pytest.raises(UsageError, match="keep .* or abort"):
        SPEAKS.pause("wait")


def test_sglang_is_made_idle_before_it_gives_memory_back_for_its_scheduler_dies_otherwise():
    sent = SPEAKS.sleep(2)
    assert sent[:-1] == SPEAKS.pause("abort")
    assert (sent[-1].path, sent[-1].body) == (
        "/release_memory_occupation",
        {"tags": ["weights", "kv_cache", "cuda_graph"]},
    )


def test_sglang_generates_again_with_its_cache_and_not_with_its_weights_alone():
    (weights,) = SPEAKS.wake(["weights"])
    assert (weights.path, weights.body) == ("/resume_memory_occupation", {"tags": ["weights"]})
    cache = SPEAKS.wake(["kv_cache"])
    assert cache[0].body == {"tags": ["kv_cache", "cuda_graph"]} and cache[1:] == SPEAKS.resume()


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ({}, ()),
        ({"enable_memory_saver": True}, (2,)),
        ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, (1,)),
        ({"enable_weights_cpu_backup": True}, ()),
    ],
)
def test_whether_sglang_can_sleep_is_seen_in_its_flags(flags, levels):
    assert probed(**flags).sleep_levels == levels


def test_leaving_a_transfer_that_is_not_there_is_no_failure():
    sent = SPEAKS.leave_transfer("g")
    assert [http.path for http in sent] == ["/destroy_weights_update_group", "/end_weight_update"]
    assert all(400 in http.tolerate for http in sent)
    assert 500 in sent[0].tolerate, "a server with data-parallel replicas has no groups"


@pytest.mark.parametrize(("flags", "own"), [({}, None), ({"enable_deterministic_inference": False}, False)])
def test_whether_a_sample_has_a_seed_of_its_own_is_seen_in_its_flags(flags, own):
    assert probed(**flags).own_seeds is own


# -- launching


def test_argv_on_gpus(tmp_path):
    argv = SPEAKS.argv(launch(tmp_path, extra_args=("--enable-deterministic-inference",)))
    assert argv[:3] == ["/envs/sglang/bin/python", "-P", "-c"] and argv[4] == str(tmp_path / "key")
    assert option(argv, "--model-path") == "/models/tiny"
    assert (option(argv, "--host"), option(argv, "--port")) == ("127.0.0.1", "8102")
    assert (option(argv, "--tp-size"), option(argv, "--random-seed"), option(argv, "--context-length")) == (
        "2",
        "41",
        "4096",
    )
    assert option(argv, "--weight-version") == f"boot-{RID}"
    assert {"--enable-metrics", "--incremental-streaming-output"} <= {*argv}
    assert "--device" not in argv and "--dtype" not in argv and "--trust-remote-code" not in argv
    assert argv[-1] == "--enable-deterministic-inference"
    assert SPEAKS.environment(launch(tmp_path))["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_argv_on_a_cpu(tmp_path):
    on_cpu = launch(tmp_path, device="cpu", gpus=(), trust_remote_code=True)
    argv, environment = SPEAKS.argv(on_cpu), SPEAKS.environment(on_cpu)
    assert (option(argv, "--device"), option(argv, "--attention-backend"), option(argv, "--dtype")) == (
        "cpu",
        "torch_native",
        "float32",
    )
    assert "--trust-remote-code" in argv
    assert option(argv, "--mem-fraction-static") == "0.5"
    given = SPEAKS.argv(launch(tmp_path, device="cpu", gpus=(), extra_args=("--mem-fraction-static=0.2",)))
    assert given.index("--mem-fraction-static=0.2") > given.index("--mem-fraction-static")  # the last one counts
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1" and environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("sizes", "cores"), [({"tp": 1, "dp": 2}, "0|1"), ({"tp": 2, "pp": 2}, "0|1|2|3")])
def test_on_a_cpu_every_worker_has_a_core_of_its_own(tmp_path, sizes, cores):
    environment = SPEAKS.environment(launch(tmp_path, device="cpu", gpus=(), **sizes))
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == cores
    alone = SPEAKS.environment(launch(tmp_path, device="cpu", gpus=(), tp=1))
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in alone


def test_routers_ask_health_so_it_must_not_generate(tmp_path):
    assert SPEAKS.environment(launch(tmp_path))["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_the_key_is_neither_in_the_command_line_nor_in_the_environment(tmp_path):
    (tmp_path / "key").write_text("very-secret")
    started = launch(tmp_path)
    assert not any("very-secret" in text for text in [*SPEAKS.argv(started), *SPEAKS.environment(started).values()])


STAND_IN = """
import argparse
parser = argparse.ArgumentParser()
for flag in ("--api-key", "--model-path", "--port"):
    parser.add_argument(flag)
print(parser.parse_known_args()[0])
"""


@pytest.mark.parametrize("key", ["plain", "-begins-like-a-flag", "--port"])
def test_whatever_the_key_is_sglangs_parser_takes_it_for_one(tmp_path, key):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(STAND_IN)
    (tmp_path / "key").write_text(key + "\n")
    launched = subprocess.run(
        [sys.executable, "-P", "-c", LAUNCHER, str(tmp_path / "key"), "--model-path", "/m", "--port", "1"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert launched.stdout.strip() == f"Namespace(api_key={key!r}, model_path='/m', port='1')", launched.stderr
