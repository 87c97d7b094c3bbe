"""`rltool serve-trainer` with a real vLLM and the released tinker client: train, publish adapters, sample from them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rltool.engines.run_client import SERVED_ROLE, Driver
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.state import read_state
from rltool.processes.stop_run import stop_run
from rltool.rollout.measure.dump import write_dump
from rltool.rollout.sample import Sample, SampleStatus
from rltool.tinker.launch import ROLE
from rltool.tinker.paths import STATES, parse_path
from tests.contract.tinker.tested_by import check_called, routes_of
from tests.e2e.engines import clients_python, free_port
from tests.e2e.job import REPOSITORY, Job, write_job
from tests.e2e.test_tinker import CLIENT, result_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

EXAMPLES = REPOSITORY / "examples"

EXACT = 1e-5
"""Between engine and trainer, both in float32 on a CPU."""


@dataclass(frozen=True)
class Served:
    job: Job
    run: RunDirectory
    url: str
    keys: Path

    def kill(self, role: str, number: int = signal.SIGKILL) -> None:
        state = read_state(self.run, role)
        assert state is not None
        os.kill(state.pid, number)

    def wait_for(self, text: str, times: int = 1) -> None:
        """In the log of the server."""
        ends = time.monotonic() + 240
        while self.log().count(text) < times:
            assert time.monotonic() < ends, (text, self.log()[-4000:])
            time.sleep(0.5)

    def client(self, who: str, script: str, *more: str) -> subprocess.Popen[str]:
        key = (self.keys / who).read_text().strip()
        command = [str(clients_python()), str(CLIENT), self.url, key, script, *more]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.job.root), "TINKER_TELEMETRY": "0"}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=self.job.root
        )

    def result(self, who: str, script: str, *more: str) -> Any:
        found = result_of(self.client(who, script, *more))
        assert "failed" not in found, (found, self.log()[-3000:])
        return found

    def requests(self) -> dict[str, int]:
        """Of the server's process, by route."""
        return Driver(self.url, self.run.key_file, SERVED_ROLE).served().get("requests", {})

    def log(self) -> str:
        state = read_state(self.run, ROLE)
        return "" if state is None or state.log is None else state.log.read_text()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Iterator[Served]:
    clients_python()
    root = tmp_path_factory.mktemp("served")
    with serving(root, tiny_tied_dir, 8, "--lora-rank", "8", "--lora-slots", "2") as found:
        yield found


@pytest.fixture(autouse=True)
def calls_what_the_docs_say(request: pytest.FixtureRequest) -> Iterator[None]:
    if not routes_of(request.node.name):
        yield
        return
    served = request.getfixturevalue("served")
    before = served.requests()
    yield
    check_called(request.node.name, before, served.requests())


@contextmanager
def serving(
    root: Path, model: Path, rank: int, *of_engines: str, of_trainer: Sequence[str] = ()
) -> Iterator[Served]:  # fmt: skip
    keys = root / "keys"
    keys.mkdir()
    for who in ("alice", "bob"):
        (keys / who).touch(mode=0o600)
        (keys / who).write_text(f"tml-{who}")
    with ExitStack() as stack:
        job = Job(root, model)
        job.say(
            "serve-engines", str(model), "--device", "cpu", "--max-model-len", "128", *of_engines, "--run", "lab",
            "--detach",
        )  # fmt: skip
        run = open_run("lab", create=False, root=job.runs)
        stack.callback(stop_run, run)
        port = free_port()
        (root / "shared").mkdir()
        (root / "tiny").symlink_to(model)  # where clients that run in `root` find the tokenizer
        job.say(
            "serve-trainer", str(model), "--rollout-external", f"@{run.endpoints_file}", "--keys", str(keys),
            "--port", str(port), "--checkpoints", str(root / "shared"),
            "--lora-rank", str(rank), "--served-name", "tiny", "--set", "model.dtype=float32",
            "--set", "trainer.torch_threads=1", "--set", "trainer.max_tokens_per_micro_batch=256", "--detach",
            *of_trainer,
        )  # fmt: skip
        yield Served(job, run, f"http://127.0.0.1:{port}", keys)


def test_a_client_trains_and_samples_and_both_agree_on_every_log_probability(served):
    found = served.result("alice", "sampling")
    for name in ("base", "trained", "saved", "scored"):
        np.testing.assert_allclose(found[name]["sampled"], found[name]["trainer"], atol=EXACT, err_msg=name)
    assert np.abs(np.subtract(found["base"]["trainer"], found["trained"]["trainer"])).max() > 1e-3
    assert found["base_model"] == "tiny" and found["not_asked"] is None
    assert [len({tuple(each) for each in three}) for three in found["several"]] == [3, 3, 3]
    assert found["several"][0] == found["several"][1] != found["several"][2]
    assert found["top_1"] == [found["top_1"][0]] * 3 and found["top_1"][0][:4] == found["greedy"]
    stop, text, said, reason = found["stop_text"]
    assert reason == "stop" and stop in said and len(said) < len(text) and text.startswith(said)
    assert found["seeded"][0] == found["seeded"][1] != found["seeded"][2]
    assert found["stopped"] == ["stop", 1] and found["length"] == "length"
    assert all(np.argmax([p for _, p in row]) == 0 for row in found["topk"])
    assert found["topk_of_greedy"] == found["greedy"]
    assert found["old_and_new"][0] == found["old_and_new"][1]
    assert found["last_n"][:-2] == [None] * (len(found["last_n"]) - 2)
    errors = found["errors"]
    for name, text in {
        "long": "are more than the 128 tokens", "alternatives": "prompt_alt_tokens_k is not supported",
        "rank": "adapters up to rank 8", "path": "one for sampling is wanted",
        "gone": "there are no weights", "top_p": "top_p is 0",
    }.items():  # fmt: skip
        assert text in errors[name], (name, errors[name])


def test_the_example_of_an_own_loop_trains_as_train_does_on_the_same_samples(served, tmp_path):
    replay = write_job(tmp_path, served.job.model, None)
    own = served.result("alice", "own_loop", str(replay.root), "1", str(EXAMPLES), "1e-3")
    updates = own["updates"]
    assert len(updates) == 2
    for step, each in enumerate(updates):
        samples = []
        for group, (prompt, sampled, rewards) in enumerate(each["groups"]):
            for index, ((tokens, logprobs), reward) in enumerate(zip(sampled, rewards, strict=True)):
                sample = Sample(4 * step + group, index, group, prompt, status=SampleStatus.COMPLETED)
                sample.response_ids, sample.response_logprobs = tokens, logprobs
                sample.response_mask, sample.reward = [1] * len(tokens), reward
                samples.append(sample)
        write_dump(tmp_path / "sampled", step=step, seed=0, samples=samples)
    replay(
        "debug train-only", "replay", "--rollouts", str(tmp_path / "sampled"), "--steps", "2",
        sets=[
            "seed=0", "optimizer_steps_per_rollout=1", "lora.rank=4", "algorithm.advantage.normalize_std=true",
            "algorithm.old_logprobs=rollout",
        ],
    )  # fmt: skip
    trained = replay.steps("replay")
    for name, key in {"loss": "train/loss", "norm": "train/grad_norm"}.items():
        ours, theirs = [each[name] for each in updates], [each[key] for each in trained]
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6, abs=1e-6), name
        # The second is of the weights after the first; Adam has divided rounding of small gradients by their size.
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name
    (served.job.root / "shared" / "trained").symlink_to(replay.runs / "replay" / "checkpoints" / "step_2")
    paths = own["path"], "tinker://shared/weights/trained"
    begun, by_client, by_train = served.result("alice", "both_states", *paths)["states"]
    np.testing.assert_allclose(by_client, by_train, atol=EXACT)
    assert np.abs(np.subtract(begun, by_client)).max() > 1e-3
    at = parse_path(own["path"], STATES)
    adapter = replay.root / "adapter"
    saved = served.run.path / "served" / "checkpoints" / at.model / at.name
    served.job.say("convert-ckpt", str(saved), str(adapter), "--to", "peft")
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
    assert updates[0]["norm"] > 1e-3 and abs(updates[1]["loss"]) > 1e-4


def test_two_tenants_sample_beside_each_other_and_neither_from_the_others_weights(served):
    alone = served.result("alice", "rounds", "1")
    both = [served.client(who, "rounds", seed) for who, seed in (("alice", "1"), ("bob", "2"))]
    first, second = (result_of(each) for each in both)
    assert first["rounds"] == alone["rounds"] != second["rounds"]
    assert "there is no model" in served.result("bob", "stranger_sampler", first["path"])["error"]


@pytest.mark.long
def test_an_engine_that_was_killed_gets_the_adapters_again_and_a_killed_server_goes_on(served):
    client = served.client("alice", "long_rounds")
    assert client.stderr is not None
    for line in client.stderr:
        if line.startswith("round 2"):
            served.kill("engine-0")
        if line.startswith("round 4"):
            served.kill(ROLE)
        if line.startswith("round 6"):
            break
    found = result_of(client)
    assert "failed" not in found, (found, served.log()[-3000:])
    assert found["rounds"] == served.result("alice", "long_rounds")["rounds"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [4, 0])
def test_a_restarted_server_goes_on_with_the_engine_that_is_there_and_the_other_joins_later(
    tmp_path, tiny_tied_dir, rank
):
    """Each client dies without a word, and the next one's model takes the place of its."""
    clients_python()
    adapters = ("--lora-rank", "4", "--lora-slots", "2") if rank else ()
    few = ("--session-timeout", "25", *(("--max-models", "1") if rank else ()))
    with serving(tmp_path, tiny_tied_dir, rank, "--num-engines", "2", *adapters, of_trainer=few) as served:

        def check(first: bool = False) -> None:
            found = served.result("alice", "when_there_is_room", str(rank), "120")
            np.testing.assert_allclose(found["sampled"], found["trainer"], atol=EXACT)
            text = "1 models, the most" if rank else "trains all weights"
            assert bool(found["refused"]) != first and all(text in each for each in found["refused"])

        check(first=True)
        away = read_state(served.run, "engine-1")
        assert away is not None
        served.kill("engine-1", signal.SIGSTOP)
        served.kill(ROLE)
        served.wait_for("serving on", 2)
        check()
        assert f"engine {away.url}: " not in served.log().rpartition("serving on")[2]
        served.kill("engine-1", signal.SIGCONT)
        served.wait_for(f"engine {away.url}: - -> starting")
        served.kill("engine-0", signal.SIGSTOP)
        try:
            check()  # by the other alone
        finally:
            served.kill("engine-0", signal.SIGCONT)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_weights_are_trained_and_sampled_by_version_over_a_kill_and_checkpoints_go_to_and_fro(
    tmp_path, tiny_tied_dir
):
    clients_python()
    with serving(tmp_path, tiny_tied_dir, 0) as served:
        client = served.client("alice", "full", "3")
        assert client.stderr is not None
        for line in client.stderr:
            for word, role in (("ahead", ROLE), ("engine", "engine-0")):
                if line.startswith(word):
                    served.kill(role)
            if line.startswith("engine"):
                break
        found = result_of(client)
        assert "failed" not in found, (found, served.log()[-4000:])
        for name in ("base", "one", "two"):
            np.testing.assert_allclose(found[name]["sampled"], found[name]["trainer"], atol=EXACT, err_msg=name)
        np.testing.assert_allclose(found["prompt"], found["prompt_of_one"], atol=EXACT)
        versions = found["versions"]
        assert len({str(tokens) for tokens, _ in versions.values()}) == 3, "what is mixed up would show"
        seen = [("one", each) for each in (*found["first"], *found["still"])]
        for name, (tokens, logprobs) in [*seen, ("two", found["again"])]:
            assert tokens == versions[name][0]
            np.testing.assert_allclose(logprobs, versions[name][1], atol=EXACT)
        assert len(found["mixed"]) == 9 and all(tokens == versions[name][0] for name, tokens in found["mixed"])
        for name in ("undisturbed", "loaded", "went_on", "made"):
            assert found[name][0] == found[name][1], name
        assert found["info"] == [False, None] and found["weights_info"] == [False, None, 2, True]
        errors = found["errors"]
        for name, text in {
            "second": "trains all weights, so there can be no other beside it", "adapter": "ask for rank 0",
            "part": "train_mlp has to be true", "unloaded": "is unloaded",
        }.items():  # fmt: skip
            assert text in errors[name], (name, errors[name])
        at = parse_path(found["state"], STATES)
        state = served.run.path / "served" / "checkpoints" / at.model / at.name
        job, losses = write_job(tmp_path / "replay", served.job.model, None), []
        for run, begin in (("state", state), ("named", served.run.path / "served" / "samplers" / at.model / "named")):
            job("debug train-only", run, "--fake-data", "--steps", "1", sets=[f"model.path={begin}"])
            losses.append([job.steps(run)[0][key] for key in ("train/loss", "train/grad_norm")])
        assert losses[0] == losses[1], "of the same weights"
        trained = job.runs / "state" / "checkpoints" / "step_1"
        (served.job.root / "shared" / "trained").symlink_to(trained)
        tokens = [5, 17, 40, 3, 90, 61]
        other = served.result(
            "alice", "full_state", "tinker://shared/weights/trained", found["made_model"], ",".join(map(str, tokens))
        )  # fmt: skip
        job.say("convert-ckpt", str(trained), str(tmp_path / "hf"), "--to", "hf")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        expected = exported(torch.tensor([tokens])).logits[0, -2].log_softmax(-1)[tokens[-1]].item()
        assert other["loaded"] == pytest.approx([expected], abs=EXACT) and other["step"] > 0
        assert abs(other["begun"][0] - expected) > 1e-4


def test_status_shows_the_server_and_engines_without_adapters_are_refused_at_start(served):
    said = served.job.say("status", "--run", "lab")
    assert ROLE in said and served.url in said and "calls done" in said
    refused = served.job.say(
        "serve-trainer", str(served.job.model), "--rollout-external", f"@{served.run.endpoints_file}", "--lora-rank",
        "16", "--run", "other", code=2,
    )  # fmt: skip
    assert "takes adapters up to rank 8, and --lora-rank is 16" in refused
