"""The vLLM dialect: requests, replies, argv and environment, without a network."""

import json
import math
from pathlib import Path

import pytest

from rltool.config.serve import EngineLaunch
from rltool.engines.dialects.vllm import MAX_N_PER_REQUEST, VllmDialect
from rltool.engines.dialects.vllm_launch import VllmLaunching
from rltool.engines.types import Drafts, EngineLoad, GenerateRequest, SamplingParams, VersionSpan
from rltool.errors import EngineError, MissingLogprobs, UsageError

DIALECT = VllmDialect()


def request(**changes):
    return GenerateRequest(**({"prompt_ids": (5, 6), "sampling": SamplingParams(8), "request_id": "r" * 32} | changes))


def choice(index=0, tokens=(7, 8), logprobs=(-0.5, -1.5), **changes):
    content = [{"token_id": t, "logprob": lp, "rank": 1} for t, lp in zip(tokens, logprobs, strict=False)]
    spans = [{"version": "v", "start": 0, "end": len(tokens)}]
    made = {
        "index": index,
        "token_ids": list(tokens),
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "weight_versions": spans,
    }
    return made | changes


def launch(**changes):
    values = {
        "index": 0, "model": Path("/models/tiny"), "host": "127.0.0.1", "port": 8101, "gpus": (), "tp": 1,
        "device": "cpu",
        "served_name": "policy", "dtype": None, "max_model_len": None, "seed": 3, "trust_remote_code": False,
        "python": Path("/venv/bin/python"), "key_file": Path("/run/key"), "boot_id": "b" * 32,
        "weight_backend": "rltool",
        "work_dir": Path("/run"),
    }  # fmt: skip
    return EngineLaunch(**(values | changes))


def flag(argv, name):
    return argv[argv.index(name) + 1]


def test_token_ids_go_in_with_the_sampled_tokens_logprob_asked_for():
    sampling = SamplingParams(8, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(1, 2), ignore_eos=True)
    (http,) = DIALECT.generate(request(sampling=sampling, n=3, seed=9))
    assert (http.method, http.path) == ("POST", "/inference/v1/generate")
    assert http.body["token_ids"] == [5, 6]
    assert http.body["request_id"] == "r" * 32
    assert http.body["sampling_params"] == {
        "n": 3, "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "logprobs": 0, "detokenize": False, "seed": 9,
    }  # fmt: skip


@pytest.mark.parametrize("n", [1, 3, 64, 130])
def test_an_abort_names_every_request_of_a_prompt_as_vllm_names_it_inside(n):
    asked = request(n=n)
    ids = DIALECT.request_ids(asked)
    assert ids == [http.body["request_id"] for http in DIALECT.generate(asked)]
    (http,) = DIALECT.abort(ids)
    assert (http.method, http.path) == ("POST", "/inference/v1/abort_requests")
    assert http.body == {"request_ids": [f"generate-tokens-{request_id}" for request_id in ids]}


def test_aborting_nothing_sends_nothing_for_an_empty_list_may_mean_everybody():
    assert DIALECT.abort([]) == []


METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 64.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="policy"} 32.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason. Reason labels: 'capacity' ...
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 32.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.0416
"""
"""What a 0.32.0 answered, cut to the lines about it."""


def test_the_load_is_read_from_the_metrics():
    assert (DIALECT.load().method, DIALECT.load().path) == ("GET", "/metrics")
    assert DIALECT.parse_load(METRICS) == EngineLoad(64, 32, 0.0416)


def test_the_load_of_data_parallel_engines_is_their_sum_and_the_fullest_cache():
    second = METRICS.replace('engine="0"', 'engine="1"').replace("64.0", "3.0").replace("0.0416", "9.5e-01")
    assert DIALECT.parse_load(METRICS + second) == EngineLoad(67, 64, 0.95)


@pytest.mark.parametrize(
    "name", ["vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{"]
)
def test_a_metric_that_is_missing_is_an_error_that_names_it_and_not_an_idle_engine(name):
    with pytest.raises(EngineError, match=name[:-1] + ".*--disable-log-stats"):
        DIALECT.parse_load("\n".join(line for line in METRICS.splitlines() if not line.startswith(name)))
    with pytest.raises(EngineError, match="--disable-log-stats"):
        DIALECT.parse_load(None)


@pytest.mark.parametrize("level", [1, 2])
def test_vllm_sleeps_at_a_level_and_wakes_by_tags_weights_first(level):
    (sleep,) = DIALECT.sleep(level)
    assert (sleep.method, sleep.path, sleep.query) == ("POST", "/sleep", {"level": str(level), "mode": "abort"})
    woken = DIALECT.wake(["kv_cache", "weights"])
    assert [(http.path, http.query) for http in woken] == [
        ("/wake_up", {"tags": "weights"}),
        ("/wake_up", {"tags": "kv_cache"}),
    ]


def test_vllm_can_free_its_cache_alone_and_its_weights_not():
    paths = [http.path for http in DIALECT.sleep(1, ["kv_cache"])]
    assert paths == ["/pause", "/release_kv_cache_memory"]
    with pytest.raises(UsageError, match="only together"):
        DIALECT.sleep(1, ["weights"])


@pytest.mark.parametrize("tags", [[], ["cuda_graph"]])
def test_no_tags_which_would_mean_all_are_never_sent(tags):
    for call in (lambda: DIALECT.sleep(1, tags), lambda: DIALECT.wake(tags)):
        with pytest.raises(ValueError, match="memory tags"):
            call()


def test_without_a_seed_none_is_sent():
    (http,) = DIALECT.generate(request())
    assert "seed" not in http.body["sampling_params"]


def seeds(requests):
    """The seed of every sample: vLLM adds the sample's index within its request."""
    return [r.body["sampling_params"]["seed"] + i for r in requests for i in range(r.body["sampling_params"]["n"])]


@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**31 - 3])
@pytest.mark.parametrize("n", [1, 4, MAX_N_PER_REQUEST, MAX_N_PER_REQUEST * 2 + 1])
def test_sample_i_has_seed_plus_i_modulo_2_to_the_31_however_the_request_is_split(seed, n):
    requests = DIALECT.generate(request(n=n, seed=seed))
    assert seeds(requests) == [(seed + i) % 2**31 for i in range(n)]
    assert all(r.body["sampling_params"]["n"] <= MAX_N_PER_REQUEST for r in requests)
    assert len({r.body["request_id"] for r in requests}) == len(requests)


def test_completions_come_in_the_order_of_their_index():
    replies = [{"choices": [choice(1, (9,), (-2.0,)), choice(0)]}]
    first, second = DIALECT.parse_generate(request(n=2), replies)
    assert (first.token_ids, first.logprobs, first.finish_reason) == ((7, 8), (-0.5, -1.5), "stop")
    assert first.versions == (VersionSpan("v", 0, 2),)
    assert second.token_ids == (9,)


def test_cached_tokens_and_drafts_are_those_of_one_sample_or_unknown():
    usage = {"prompt_tokens_details": {"cached_tokens": 3}}
    drafts = {"speculative_decoding": {"num_spec_steps": 4, "num_accepted_draft_tokens": 6}}
    [one] = DIALECT.parse_generate(request(), [{"choices": [choice()], "usage": usage, "metrics": drafts}])
    assert (one.cached_tokens, one.drafts) == (3, Drafts(4, 6))
    several = DIALECT.parse_generate(request(n=2), [{"choices": [choice(0), choice(1, **drafts)], "usage": usage}])
    assert [(s.cached_tokens, s.drafts) for s in several] == [(None, None), (None, Drafts(4, 6))]
    [silent] = DIALECT.parse_generate(request(), [{"choices": [choice()], "usage": None, "metrics": None}])
    assert (silent.cached_tokens, silent.drafts) == (None, None)


def test_replies_of_a_split_request_are_joined():
    n = MAX_N_PER_REQUEST + 1
    replies = [{"choices": [choice(i) for i in range(MAX_N_PER_REQUEST)]}, {"choices": [choice(0, (9,), (-2.0,))]}]
    completions = DIALECT.parse_generate(request(n=n), replies)
    assert len(completions) == n and completions[-1].token_ids == (9,)


@pytest.mark.parametrize(
    "broken",
    [
        choice(logprobs=(-0.5,)),
        choice() | {"logprobs": None},
        choice() | {"logprobs": {"content": None}},
        choice(logprobs=(-0.5, math.nan)),
        choice(logprobs=(-0.5, None)),
        choice(logprobs=(-0.5, -math.inf)),
        choice(logprobs=(-0.5, -9999.0)),
    ],
    ids=["one short", "none", "no content", "nan", "null", "minus infinity", "stand-in"],
)
def test_a_missing_logprob_raises(broken):
    with pytest.raises(MissingLogprobs):
        DIALECT.parse_generate(request(), [{"choices": [broken]}])


def test_a_logprob_of_another_token_raises():
    wrong = choice()
    wrong["logprobs"]["content"][1]["token_id"] = 99
    with pytest.raises(EngineError, match="log-probability 1 is that of token 99, the sampled token is 8"):
        DIALECT.parse_generate(request(), [{"choices": [wrong]}])


@pytest.mark.parametrize(
    "reply", [{}, {"choices": None}, {"choices": []}, {"choices": [choice(), choice(1)]}, "text", None]
)
def test_another_number_of_choices_raises(reply):
    with pytest.raises(EngineError, match="1 samples were asked for"):
        DIALECT.parse_generate(request(), [reply])


def test_an_unknown_finish_reason_raises():
    with pytest.raises(EngineError, match="'error'"):
        DIALECT.parse_generate(request(), [{"choices": [choice(finish_reason="error")]}])


def test_an_aborted_sample_without_tokens_is_a_completion():
    empty = choice(tokens=(), finish_reason="abort", weight_versions=None)
    (completion,) = DIALECT.parse_generate(request(), [{"choices": [empty]}])
    assert (completion.token_ids, completion.finish_reason, completion.versions) == ((), "abort", ())


def test_the_launch_line_asks_for_tempered_logprobs_the_guard_and_the_weight_backend():
    argv = DIALECT.argv(launch())
    assert argv[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert flag(argv, "--logprobs-mode") == "processed_logprobs"
    assert flag(argv, "--middleware") == "rltool.engines.plugin.entry.RltoolMiddleware"
    assert flag(argv, "--weight-transfer-config") == '{"backend": "rltool"}'
    assert (flag(argv, "--host"), flag(argv, "--port"), flag(argv, "--seed")) == ("127.0.0.1", "8101", "3")
    assert (flag(argv, "--model"), flag(argv, "--served-model-name")) == ("/models/tiny", "policy")
    assert "--enable-scale-out" in argv and "--trust-remote-code" not in argv


def test_on_the_cpu_the_engine_computes_in_float32_and_eagerly():
    argv = DIALECT.argv(launch())
    assert flag(argv, "--dtype") == "float32" and "--enforce-eager" in argv
    assert DIALECT.environment(launch())["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("longest", [256, 9000])
def test_on_the_cpu_no_prompt_is_prefilled_in_pieces(longest):
    argv = DIALECT.argv(launch(max_model_len=longest))
    assert "--no-enable-chunked-prefill" in argv
    assert int(flag(argv, "--max-num-batched-tokens")) >= longest


def test_on_gpus_the_models_own_dtype_and_graphs_are_kept():
    gpu = launch(device="cuda", gpus=(2, 3), tp=2, weight_backend="nccl")
    argv = DIALECT.argv(gpu)
    assert "--dtype" not in argv and "--enforce-eager" not in argv and "--max-model-len" not in argv
    assert flag(argv, "--tensor-parallel-size") == "2"
    environment = DIALECT.environment(gpu)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not any(name.startswith("VLLM_CPU") or name == "OMP_NUM_THREADS" for name in environment)


def test_flags_of_the_user_come_last_and_untouched():
    argv = DIALECT.argv(
        launch(extra_args=("--max-num-seqs", "4"), trust_remote_code=True, dtype="bfloat16", max_model_len=99)
    )
    assert argv[-2:] == ["--max-num-seqs", "4"]
    assert "--trust-remote-code" in argv
    assert (flag(argv, "--dtype"), flag(argv, "--max-model-len")) == ("bfloat16", "99")


def test_the_context_of_a_long_model_is_bounded_on_the_cpu(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 131072}')
    assert flag(DIALECT.argv(launch(model=tmp_path)), "--max-model-len") == "2048"
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert flag(DIALECT.argv(launch(model=tmp_path)), "--max-model-len") == "512"


def test_latent_attention_in_float32_on_a_cpu_does_not_take_amxs_kernels_which_are_for_bf16(tmp_path):
    def backend(config, **more):
        (tmp_path / "config.json").write_text(config)
        argv = DIALECT.argv(launch(model=tmp_path, **more))
        return [argv[i + 1] for i, word in enumerate(argv) if word == "--attention-backend"]

    latent = '{"kv_lora_rank": 512}'
    assert backend(latent) == backend(latent, dtype="float32") == ["CPU_MLA"]
    assert backend("{}") == backend('{"kv_lora_rank": null}') == backend("[]") == backend("{") == []
    assert backend(latent, dtype="bfloat16") == backend(latent, device="cuda", gpus=(0,)) == []
    own = ("--attention-backend", "AMX_MLA")
    assert backend(latent, extra_args=own)[-1] == "AMX_MLA", "a flag of the user's comes last"


def test_the_key_is_in_a_file_and_an_inherited_one_does_not_interfere():
    environment = DIALECT.environment(launch())
    assert environment["RLTOOL_KEY_FILE"] == "/run/key"
    assert environment["RLTOOL_BOOT_ID"] == "b" * 32
    assert environment["VLLM_API_KEY"] == ""
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu"},
        {"extra_args": ("--hf_overrides", '{"rope_theta": 1e6}')},
        {"extra_args": ("--hf-overrides.head_dtype=model",)},
        {"extra_args": ("--quantization=fp8",)},
        {"extra_args": ("-qfp8",)},
        {"extra_args": ("--config", "engine.yaml")},
        {"model": Path("/models/tiny.gguf")},
        {"task": "classify"},
    ],
)
def test_logits_are_left_to_vllm_where_fp32_ones_cannot_be_had_or_somebody_else_decides(changes):
    argv = DIALECT.argv(launch(**({"device": "cuda", "gpus": (0,)} | changes)))
    assert [word for word in argv if "head_dtype" in word] == [
        word for word in changes.get("extra_args", ()) if "head_dtype" in word
    ]


def test_an_engine_in_fp8_quantises_what_it_loads_and_computes_in_bfloat16():
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    on_cpu, on_gpu = launch(quantization=config), launch(device="cuda", gpus=(0,), quantization=config)
    argv = DIALECT.argv(on_cpu)
    assert (flag(argv, "--dtype"), flag(argv, "--load-format")) == ("bfloat16", "rltool_fp8")
    assert json.loads(flag(argv, "--hf-overrides")) == {"quantization_config": config}
    overrides = json.loads(flag(DIALECT.argv(on_gpu), "--hf-overrides"))
    assert overrides == {"head_dtype": "float32", "quantization_config": config}
    assert DIALECT.environment(on_gpu)["RLTOOL_FP8"] == "1"
    assert "RLTOOL_FP8" not in DIALECT.environment(launch())


def test_a_gpu_engine_computes_logits_in_fp32_unless_the_checkpoint_is_quantized(tmp_path):
    on_gpu = launch(device="cuda", gpus=(0,), model=tmp_path)
    assert flag(DIALECT.argv(on_gpu), "--hf-overrides") == '{"head_dtype": "float32"}'
    (tmp_path / "config.json").write_text("{}")
    assert "--hf-overrides" in DIALECT.argv(on_gpu)
    for quantized in ('{"quantization_config": {}}', '{"text_config": {"compression_config": {}}}'):
        (tmp_path / "config.json").write_text(quantized)
        assert "--hf-overrides" not in DIALECT.argv(on_gpu)
    (tmp_path / "config.json").write_text('{"text_config": null}')
    assert "--hf-overrides" in DIALECT.argv(on_gpu)
    (tmp_path / "hf_quant_config.json").touch()
    assert "--hf-overrides" not in DIALECT.argv(on_gpu)


def test_an_exact_engine_runs_batch_invariant_kernels_and_no_others(tmp_path):
    """Its head stays in the model's dtype, and nothing is fused."""
    exact = launch(exact=True, device="cuda", gpus=(0,))
    argv = DIALECT.argv(exact)
    assert DIALECT.environment(exact)["VLLM_BATCH_INVARIANT"] == "1"
    assert json.loads(flag(argv, "--compilation-config")) == {"mode": 0, "cudagraph_mode": "FULL"}
    assert "head_dtype" not in " ".join(argv)
    usual = exact.model_copy(update={"exact": False})
    assert "VLLM_BATCH_INVARIANT" not in DIALECT.environment(usual)
    assert "--compilation-config" not in DIALECT.argv(usual) and "head_dtype" in " ".join(DIALECT.argv(usual))


@pytest.mark.parametrize(
    ("config", "device", "why"),
    [
        ({"head_dim": 128}, "cuda", None), ({"hidden_size": 1536, "num_attention_heads": 12}, "cuda", None),
        ({"head_dim": 128}, "cpu", "are for GPUs"), ({"hidden_size": 896, "num_attention_heads": 14}, "cuda", None),
        ({"head_dim": 96}, "cuda", "other heads than those of 64 and 128"),
    ],
)  # fmt: skip
def test_it_is_exact_on_gpus_in_heads_of_64_and_128(tmp_path, config, device, why):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = VllmLaunching().not_exact(device, tmp_path)
    assert found is None if why is None else why in (found or "")
