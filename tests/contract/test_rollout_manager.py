"""The rollout manager, and `debug rollout-only`, against fake vLLM servers on real sockets.

The fake model knows the task and answers rightly or wrongly by the parity of the seed, so whatever is seeded alike must come out alike.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from aiohttp import web

from rltool.config.train import TrainConfig
from rltool.engines import arrays
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints
from rltool.errors import EngineRejected, TrainingStopped, UsageError
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.rollout.dump import dumped_steps, read_dump
from rltool.rollout.manager import RolloutManager, data_targets
from rltool.rollout.sample import SampleStatus
from rltool.rollout.tokenizer import load_tokenizer

EOS = 1


class FakeVllm:
    """Answers /inference/v1/generate and the probes in a thread of its own. `refuse`: text of a 400 for every generation;
    `abort_first`: how many of the next samples are cut after one token."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.bodies = []
        self.refuse = None
        self.abort_first = 0
        self.url = ""

    async def generate(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.refuse:
            return web.json_response({"error": self.refuse}, status=400)
        parameters = body["sampling_params"]
        choices = [self.choice(i, body["token_ids"], (parameters["seed"] + i) % 2**31, parameters["max_tokens"]) for i in range(parameters["n"])]
        return web.json_response({"choices": [self.with_arrays(c) if request.path == "/rltool/generate" else c for c in choices]})

    @staticmethod
    def with_arrays(choice):
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        tokens = arrays.encode(arrays.TOKEN, choice["token_ids"])
        return choice | {"token_ids": tokens, "logprobs": arrays.encode(arrays.LOGPROB, values)}

    def choice(self, index, ids, seed, limit):
        word, _, begun = self.tokenizer.decode(ids).partition("=")
        answer = word[::-1] if seed % 2 else word + "x"
        tokens = [*self.tokenizer.encode_prompt(answer), EOS][len(begun) :][:limit]
        reason = "stop" if tokens[-1] == EOS else "length"
        if self.abort_first > 0:
            self.abort_first -= 1
            tokens, reason = tokens[:1], "abort"
        content = [{"token_id": t, "logprob": -t / 1024, "rank": 1} for t in tokens]
        spans = [{"version": "run:0:1", "start": 0, "end": len(tokens)}]
        return {"index": index, "token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content}, "weight_versions": spans}

    async def probe(self, request):
        return web.json_response(
            {
                "/version": {"version": "0.32.0"},
                "/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]},
                "/get_world_size": {"world_size": 1},
                "/weight_info": {"weight_version": "run:0:1"},
                "/is_paused": {"is_paused": False},
                "/rltool/info": {"vocab_size": 64, "dtype": "float32", "weight_backend": "rltool", "boot_id": "b", "model_config": {}},
                "/server_info": {},
            }[request.path]
        )

    async def start(self):
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/rltool/generate", self.generate)
        app.router.add_get("/{tail:.*}", self.probe)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return runner


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def engines(model_dir):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    fakes = [FakeVllm(load_tokenizer(model_dir)) for _ in range(2)]
    runners = [asyncio.run_coroutine_threadsafe(fake.start(), loop).result(10) for fake in fakes]
    yield fakes
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


WORDS = ["sun", "bird", "chess", "neon", "bingo", "bliss", "cat", "dog", "owl"]


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{w}=", "label": w[::-1]}) + "\n" for w in [*WORDS, "much too long a prompt"]))
    return path


@pytest.fixture
def config(model_dir, data_file):
    return TrainConfig.model_validate(
        {
            "model": {"path": model_dir},
            "seed": 3,
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, },
            "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
            "deadlines": {"generate": 20},
            "data": {"train": [data_file]},
            "eval": {"sets": {"words": data_file}, "samples_per_prompt": 2},
        }
    )


def with_(config, **sections):
    values = config.model_dump()
    for name, changes in sections.items():
        values[name] = {**values[name], **changes}
    return TrainConfig.model_validate(values)


@pytest.fixture
def open_manager(engines):
    opened = []

    def open_(config, **options):
        endpoints = [EngineEndpoint(url=fake.url, dialect="vllm") for fake in engines]
        opened.append(RolloutManager(config, endpoints, **options))
        return opened[-1]

    yield open_
    for manager in opened:
        manager.close()


def test_a_rollout_is_generated_scored_and_measured(open_manager, config, engines):
    manager = open_manager(config)
    result = manager.generate(0)
    assert len(result.samples) == 16
    for sample in result.samples:
        text = manager.tokenizer.decode(sample.response_ids)
        assert sample.reward == float(text == sample.label) == float(sample.seed % 2)
        assert sample.status is SampleStatus.COMPLETED and sample.response_ids[-1] == EOS
        assert {span.version for span in sample.versions} == {"run:0:1"}
    assert result.metrics["rollout/reward_mean"] == 0.5
    assert result.metrics["rollout/tokens_per_second"] > 0
    assert (manager.num_prompts, manager.num_prompts_too_long) == (9, 1)
    assert [len(fake.bodies) for fake in engines] == [2, 2]
    assert engines[0].bodies[0]["sampling_params"]["stop_token_ids"] == [EOS]


def test_the_same_step_of_the_same_run_is_the_same_rollout(open_manager, config):
    first, second = open_manager(config), open_manager(config)
    assert first.generate(5).samples == second.generate(5).samples
    assert first.generate(6).samples != second.generate(7).samples


def test_resume_continues_with_the_next_prompts(open_manager, config):
    manager, resumed = open_manager(config), open_manager(config)
    manager.generate(0)
    state = json.loads(json.dumps(manager.state_dict()))
    expected = manager.generate(1).samples
    resumed.load_state_dict(state)
    assert resumed.generate(1).samples == expected


def test_evaluation_draws_the_same_samples_before_and_after(open_manager, config):
    manager = open_manager(config)
    before = manager.evaluate()
    manager.generate(0)
    after = manager.evaluate()
    assert before["eval/words/accuracy"] == after["eval/words/accuracy"] == 0.5
    assert before["eval/words/samples"] == 18


def test_aborted_responses_are_finished(open_manager, config, engines):
    engines[0].abort_first = 3
    result = open_manager(config).generate(0)
    for sample in result.samples:
        assert sample.status is SampleStatus.COMPLETED and sample.response_ids[-1] == EOS
        assert sample.versions[-1].end == len(sample.response_ids)
    assert sum(len(sample.versions) == 2 for sample in result.samples) == 3


def test_long_responses_are_truncated_and_counted(open_manager, config):
    result = open_manager(with_(config, sampling={"max_response_tokens": 2})).generate(0)
    assert result.metrics["rollout/truncated_fraction"] == 1.0
    assert {len(sample.response_ids) for sample in result.samples} == {2}


def test_new_targets_are_used_from_the_next_rollout_on(open_manager, config, engines):
    manager = open_manager(config)
    manager.set_targets([EngineEndpoint(url=engines[1].url, dialect="vllm")])
    manager.generate(0)
    assert [len(fake.bodies) for fake in engines] == [0, 4]


def test_a_refusal_quotes_the_engine_and_names_the_prompt_and_loses_no_prompt(open_manager, config, engines):
    manager = open_manager(config)
    before = manager.state_dict()
    for fake in engines:
        fake.refuse = "this model is tired"
    with pytest.raises(EngineRejected, match=r"prompt \d+ \(\d tokens, '\w+='\) was refused: .*this model is tired"):
        manager.generate(0)
    assert manager.state_dict() == before


def write_reward(tmp_path, monkeypatch, body):
    name = f"reward_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(f"def reward(sample, text):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    return f"{name}:reward"


def test_a_few_failing_rewards_drop_their_samples(open_manager, config, tmp_path, monkeypatch):
    path = write_reward(tmp_path, monkeypatch, "return float('nan') if sample.index == 0 else 1.0")
    result = open_manager(with_(config, reward={"function": path, "max_failure_fraction": 0.25})).generate(0)
    assert len(result.samples) == 12 and all(sample.index for sample in result.samples)
    assert result.metrics["rollout/dropped_reward_failed"] == 4


def test_many_failing_rewards_stop_the_training_with_the_reason(open_manager, config, tmp_path, monkeypatch):
    path = write_reward(tmp_path, monkeypatch, "return 1.0 if sample.index else sample.nothing")
    manager = open_manager(with_(config, reward={"function": path, "max_failure_fraction": 0.2}))
    before = manager.state_dict()
    with pytest.raises(TrainingStopped, match=r"failed on 4 of 16 samples: 4 x AttributeError.*max_failure_fraction = 0.2"):
        manager.generate(0)
    assert manager.state_dict() == before


def test_a_step_without_any_sample_left_stops_the_training(open_manager, config, tmp_path, monkeypatch):
    path = write_reward(tmp_path, monkeypatch, "raise ValueError('no')")
    with pytest.raises(TrainingStopped, match="no sample is left of 16"):
        open_manager(with_(config, reward={"function": path, "max_failure_fraction": 1.0})).generate(0)


def test_bad_data_fails_at_construction(open_manager, config, data_file):
    data_file.write_text('{"prompt": "a="}\n{broken\n')
    with pytest.raises(UsageError, match="words.jsonl, line 2"):
        open_manager(config)


def test_generation_goes_to_the_router_where_there_is_one():
    model = ModelEndpoints(engines=(EngineEndpoint(url="http://a:1", key_file=Path("/k")), EngineEndpoint(url="http://b:2")))
    assert [t.url for t in data_targets(model)] == ["http://a:1", "http://b:2"]
    [named] = data_targets(model.model_copy(update={"data_url": "http://r:3"}))
    assert (named.url, named.dialect, named.key_file) == ("http://r:3", "sglang", Path("/k"))
    assert [t.url for t in data_targets(model, router="http://other:4/")] == ["http://other:4"]


def test_closing_twice_is_fine(open_manager, config):
    manager = open_manager(config)
    manager.close()
    manager.close()


NO_RAY = "import sys; sys.modules['ray'] = None; sys.modules['megatron'] = None; from rltool.cli import main; main()"
"""With these two not importable, whatever would start a trainer fails."""


def rollout_only(config_file, *arguments, cwd):
    return subprocess.run(
        [sys.executable, "-c", NO_RAY, "debug", "rollout-only", "--config", str(config_file), *arguments],
        capture_output=True, text=True, timeout=120, cwd=cwd, env={**os.environ, "RLTOOL_RUNS": str(cwd / "runs")},
    )  # fmt: skip


@pytest.fixture
def config_file(tmp_path, model_dir, data_file):
    path = tmp_path / "run.toml"
    path.write_text(
        f'seed = 3\nsteps = 5\n[model]\npath = "{model_dir}"\n[optimizer]\nlr = 1e-3\n[data]\ntrain = ["{data_file}"]\n'
        "[rollout]\nprompts_per_step = 4\nsamples_per_prompt = 4\n[sampling]\nmax_prompt_tokens = 8\nmax_response_tokens = 8\n"
    )
    return path


def test_rollout_only_records_what_the_manager_generates(config_file, tmp_path, engines, open_manager, config):
    addresses = ",".join(fake.url for fake in engines)
    done = rollout_only(config_file, "--rollout-external", addresses, "--steps", "2", "--out", "dumps", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not used without a trainer: [optimizer]" in done.stdout and "reward 0.500" in done.stdout
    assert dumped_steps(tmp_path / "dumps") == [0, 1]
    assert read_dump(tmp_path / "dumps", 0).samples == open_manager(config).generate(0).samples

    again = rollout_only(config_file, "--rollout-external", addresses, "--out", "dumps", cwd=tmp_path)
    assert again.returncode == 2 and "already holds rollouts" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "without an address"),
        (("--rollout-external", "127.0.0.1:9", "--set", "trainer.world_size=2"), "trainer.world_size (--set)"),
        (("--rollout-external", "127.0.0.1:9", "--set", "deadlines.preflight=2"), "http://127.0.0.1:9"),
    ],
)
def test_rollout_only_refuses_what_cannot_work_and_starts_nothing(config_file, tmp_path, arguments, message):
    done = rollout_only(config_file, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "runs").exists()
