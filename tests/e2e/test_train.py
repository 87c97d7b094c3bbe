"""`rltool train` and `rltool debug` on the real vLLM, sglang-router, Ray and Megatron-core."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from rltool.checkpoints.directory import latest_checkpoint, step_of
from rltool.config.router import RouterConfig
from rltool.engines.endpoints import Endpoints, ModelEndpoints
from rltool.processes.run_directory import open_run
from rltool.processes.supervise import ProcessGroup
from rltool.rollout.measure.dump import read_dump
from rltool.router.launch import start_router
from tests.e2e.engines import RunningEngine
from tests.e2e.job import DEADLINE, STOP_SECONDS, Job, write_job
from tests.metric_names import undocumented

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path, vllm_engine_tied: RunningEngine):
    """A job whose generation goes through a real router, and the engine behind it."""
    root = tmp_path_factory.mktemp("routed")
    endpoints = Endpoints(models={"policy": ModelEndpoints(engines=(vllm_engine_tied.endpoint,))})
    run = open_run("engines", create=True, root=root / "runs")
    endpoints.save(run.endpoints_file)
    with ProcessGroup(run) as group:
        start_router(
            RouterConfig(key_file=vllm_engine_tied.endpoint.key_file),
            endpoints.models["policy"],
            group,
            endpoints_file=run.endpoints_file,
        )
        yield write_job(root, tiny_tied_dir, f"@{run.endpoints_file}")


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory, tiny_untied_dir: Path, vllm_engine_untied: RunningEngine) -> Job:
    """A job against an engine with its own output head, asked directly."""
    root = tmp_path_factory.mktemp("direct")
    endpoints = Endpoints(models={"policy": ModelEndpoints(engines=(vllm_engine_untied.endpoint,))})
    endpoints.save(root / "endpoints.json")
    return write_job(root, tiny_untied_dir, f"@{root}/endpoints.json")


def state_of_engine(engine: RunningEngine) -> tuple[bool, str]:
    """(paused, weight version)"""
    _, info = engine.http("GET", "/rltool/info", key=engine.key)
    _, paused = engine.http("GET", "/is_paused", key=engine.key)
    return paused["is_paused"], info["weight_version"]


@pytest.fixture(scope="module")
def trained(routed: Job) -> str:
    """Three steps through the router: what the other tests look at. Returns the console's output."""
    return routed("train", "trained", sets=["checkpoint.every_steps=2", "checkpoint.save_hf_every=3"])


def test_a_training_through_the_router_keeps_trainer_and_engine_equal_at_every_step(routed, trained, vllm_engine_tied):
    steps = routed.steps("trained")
    assert [record["step"] for record in steps] == [0, 1, 2]
    for record in steps:
        assert 0 < record["train/logprob_abs_diff_mean"] < 1e-5, "float32 on both sides"
        assert record["train/grad_norm"] > 0 and record["rollout/samples"] == 32
        # One bucket, and what is gathered for it.
        held = record["weights/host_bytes"] + record["weights/device_bytes"]
        assert held > record["weights/sync_bytes"] > 0 and record["time/step_seconds"] > 0
    assert trained.count("step ") >= 3 and "engines agree with the trainer within" in trained
    assert "through http://127.0.0.1" in trained
    paused, version = state_of_engine(vllm_engine_tied)
    assert not paused and version == steps[-1]["weight_version"]


def test_weights_are_synced_before_the_first_rollout_and_every_sample_carries_the_version_of_its_step(routed, trained):
    steps = routed.steps("trained")
    sampled_from = [record["weight_versions"] for record in steps]
    numbers = [int(versions[0].rsplit(":", 1)[1]) for versions in sampled_from]
    assert all(len(versions) == 1 for versions in sampled_from) and numbers == [0, 1, 2]
    assert [record["weight_version"].rsplit(":", 1)[1] for record in steps] == ["1", "2", "3"]
    dump = json.loads((routed.runs / "trained" / "rollouts" / "step_000001.json").read_text())
    assert {span[0] for sample in dump["samples"] for span in sample["versions"]} == set(sampled_from[1])


def test_it_evaluates_before_and_after_and_writes_checkpoint_export_and_tensorboard(routed, trained):
    run = routed.runs / "trained"
    evaluated = [record["step"] for record in routed.metrics("trained") if "eval/heldout/accuracy" in record]
    assert evaluated == [-1, 2]
    assert {p.name for p in (run / "checkpoints").glob("step_*")} == {"step_2", "step_3"}
    assert (run / "hf" / "step_3" / "model.safetensors").exists() and (
        run / "hf" / "step_3" / "tokenizer.json"
    ).exists()
    assert list((run / "tensorboard").iterdir())
    assert not (run / "state" / "train.json").exists()


LORA = [
    "lora.rank=4", "optimizer.lr=0.01", "algorithm.kl.kind=loss", "algorithm.kl.coef=0.01",
    "optimizer_steps_per_rollout=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def with_adapters(direct: Job) -> str:
    """A run of two steps."""
    direct("train", "lora", sets=[*LORA, "steps=2"])
    return "lora"


def assert_adapters_agree(job: Job, run: str, count: int) -> None:
    steps = job.steps(run)
    assert [record["step"] for record in steps] == list(range(count))
    for record in steps:
        assert 0 < record["train/logprob_abs_diff_mean"] < 1e-5, "merged weights, in float32 on both sides"
    assert steps[0]["train/kl"] == 0, "the reference is the model without adapters"
    assert steps[-1]["train/kl"] > 1e-6
    manifest = json.loads((latest_checkpoint(job.runs / run / "checkpoints") / "manifest.json").read_text())
    assert manifest["lora"]["rank"] == 4


def test_adapters_are_merged_for_engines_that_agree_at_every_step(direct, with_adapters):
    assert_adapters_agree(direct, with_adapters, 2)


@pytest.mark.long  # their checkpoints resume in test_lora.py, whole weights below
def test_a_run_with_adapters_resumes(direct, with_adapters):
    direct("train", with_adapters, "--resume", sets=[*LORA, "steps=4"])
    assert_adapters_agree(direct, with_adapters, 4)


def test_every_number_that_was_logged_is_explained(routed, trained):
    names = {name for record in routed.metrics("trained") for name in record if "/" in name}
    assert undocumented(names) == []
    assert {"rollout/prefix_cache_hit_rate", "train/effective_sample_fraction", "time/non_generation_seconds"} <= names
    for record in routed.steps("trained"):
        assert record["train/effective_sample_fraction"] == pytest.approx(1.0, abs=1e-6)
        assert 0 <= record["rollout/prefix_cache_hit_rate"] <= 1
    [before, after] = [r for r in routed.metrics("trained") if "eval/heldout/accuracy" in r]
    for record in (before, after):
        low, high = (record[f"eval/heldout/accuracy_{end}"] for end in ("low", "high"))
        assert 0 <= low <= record["eval/heldout/accuracy"] <= high <= 1 and low < high


def test_samples_report_and_recordings_can_be_looked_at(routed, trained):
    text = routed.say("samples", "trained", "--step", "2", "--sort", "reward", "--limit", "32")
    assert text.startswith("run trained, step 2; by reward")
    # the trainer scored the samples of the first optimizer step, of which some are kept
    found = [float(value) for value in re.findall(r"trainer - engine\| mean ([\d.e+-]+), max", text)]
    assert found and max(found) < 1e-5
    assert routed.say("report", "trained", "--out", "page.html").startswith("report of run trained")
    page = (routed.root / "page.html").read_text()
    assert "<h2>Answers</h2>" in page and "trainer 1 rank: CPU" in page and "vllm" in page and 'class="error"' in page
    rollouts = str(routed.runs / "trained")
    assert routed.say("diff-dumps", rollouts, rollouts) == "equal: 96 samples of 3 steps\n"


def test_evaluation_alone_finds_what_the_run_found(routed, trained):
    """The engine holds the weights of the run's end, and the random numbers are the same."""
    words = ("eval", "--config", "run.toml", "--rollout-external", routed.endpoints, "--out", "results.json")
    assert "95 % interval" in routed.say(*words)
    found = json.loads((routed.root / "results.json").read_text())
    last = [record for record in routed.metrics("trained") if "eval/heldout/accuracy" in record][-1]
    assert found["sets"]["heldout"]["accuracy"] == last["eval/heldout/accuracy"]
    assert found["weight_versions"] == [routed.steps("trained")[-1]["weight_version"]]


def test_a_resumed_run_fed_the_recorded_rollouts_has_bit_equal_gradients_and_parameters(routed, trained):
    recorded = routed.runs / "trained" / "rollouts"
    whole = routed("debug train-only", "whole", "--rollouts", str(recorded))
    routed("debug train-only", "halved", "--rollouts", str(recorded), "--steps", "1")
    resumed = routed("debug train-only", "halved", "--rollouts", str(recorded), "--resume")
    live, replayed, halved = (routed.steps(run) for run in ("trained", "whole", "halved"))
    assert (
        [r["train/grad_norm"] for r in live]
        == [r["train/grad_norm"] for r in replayed]
        == [r["train/grad_norm"] for r in halved]
    )
    hashes = [re.search(r"sha256:(\w+)", text).group(1) for text in (trained, whole, resumed)]
    assert len(set(hashes)) == 1
    # The loss alone would prove nothing; nor would a hash that no training changes.
    assert len({r["train/grad_norm"] for r in live}) == 3


@pytest.mark.long
def test_a_resumed_run_goes_on_against_the_engines_under_a_new_attempt(routed, trained, vllm_engine_tied):
    said = routed("train", "trained", "--resume", "--steps", "4")
    steps = routed.steps("trained")
    assert [record["step"] for record in steps] == [0, 1, 2, 3]
    assert steps[3]["train/logprob_abs_diff_mean"] < 1e-5 and "resumed after step 3" in said
    run, attempt, _ = steps[3]["weight_version"].split(":")
    assert run == steps[0]["weight_version"].split(":")[0] and int(attempt) > int(
        steps[0]["weight_version"].split(":")[1]
    )


@pytest.mark.long  # untied embeddings are also those of every run here; two ranks and the disk have tests of their own
def test_untied_embeddings_two_ranks_a_reference_model_and_the_disk_transport_agree_as_well(direct):
    sets = [
        "algorithm.kl={kind='loss', coef=0.05}",
        "steps=2",
        "optimizer_steps_per_rollout=1",
        'weights.transport="disk"',
        "trainer.world_size=2",
        "trainer.cpus_per_rank=0.5",
        'algorithm.loss_reduction="sample"',
    ]
    said = direct("train", "disk", sets=sets)
    assert "asked directly" in said and "2 Ray bundles (2 trainer, 0 engine)" in said
    for record in direct.steps("disk"):
        assert record["train/logprob_abs_diff_mean"] < 1e-5
    assert direct.steps("disk")[0]["train/kl"] == pytest.approx(0, abs=1e-7), "policy and reference start equal"
    assert direct.steps("disk")[1]["train/kl"] > 1e-4
    assert len(list((direct.runs / "disk" / "weights").iterdir())) == 2, "old versions are removed"


@pytest.mark.long
def test_a_tensor_parallel_trainer_sends_whole_tensors(direct):
    direct(
        "train",
        "tp",
        sets=["steps=1", "trainer.world_size=2", "trainer.tensor_parallel=2", "trainer.cpus_per_rank=0.5"],
    )
    assert direct.steps("tp")[0]["train/logprob_abs_diff_mean"] < 1e-5


@pytest.mark.long  # the quickstart rises by more
def test_a_reward_rises(direct):
    """The whole loop learns: GRPO on the share of lower-case letters, from a model of random weights."""
    sets = ["steps=20", "eval.sets={}", "sampling.stop_token_ids=[]", "sampling.max_response_tokens=48"]
    direct("train", "rises", sets=[*sets, "optimizer.lr=2e-3", "trainer.max_tokens_per_micro_batch=2048"])
    rewards = [record["rollout/reward_mean"] for record in direct.steps("rises")]
    assert len(rewards) == 20
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2, rewards


def wait_for_step(job: Job, run: str, step: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while f"step {step}/" not in job.output(run):
        assert time.monotonic() < deadline, job.output(run)
        time.sleep(0.2)


@pytest.mark.long  # see also test_rollout_modes.py and test_trainer_faults.py
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_frees_the_engines_and_leaves_no_process(direct, vllm_engine_untied, number, code):
    run = f"stopped-{number}"
    process = direct.start("train", run, sets=["steps=1000"])
    wait_for_step(direct, run, 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in " ".join(child.cmdline()) for child in family if child.is_running())
    process.send_signal(number)
    signalled = time.monotonic()
    assert process.wait(DEADLINE) == code, direct.output(run)
    assert time.monotonic() - signalled < STOP_SECONDS, direct.output(run)
    done = len(direct.steps(run))
    assert (direct.runs / run / "checkpoints" / f"step_{done}").is_dir(), "what was learned is saved"
    assert not state_of_engine(vllm_engine_untied)[0], "the engines serve on"
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long  # see also test_trainer_faults.py
@pytest.mark.parametrize(
    ("actor", "name"), [("TrainerActor", "trainer rank 0"), ("RolloutActor", "the rollout manager")]
)
def test_a_killed_part_ends_the_run_with_its_name_and_the_next_train_goes_on_with_the_engine(
    direct, vllm_engine_untied, actor, name
):
    run = f"without-{actor}"
    process = direct.start("train", run, sets=["steps=1000", "checkpoint.every_steps=1", "eval.sets={}"])
    wait_for_step(direct, run, 2)
    [victim] = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if " ".join(child.cmdline()).startswith(f"ray::{actor}")
    ]
    victim.kill()
    assert process.wait(DEADLINE) == 1
    said = " ".join(direct.output(run).split())
    assert f"{name} (pid {victim.pid}) died:" in said and "Traceback" not in said
    if actor == "TrainerActor":
        assert not state_of_engine(vllm_engine_untied)[0], "the rollout manager has resumed it"
    done = step_of(latest_checkpoint(direct.runs / run / "checkpoints"))
    direct("train", run, "--resume", sets=[f"steps={done + 1}", "eval.sets={}"])
    assert [record["step"] for record in direct.steps(run)] == list(range(done + 1))
    assert not state_of_engine(vllm_engine_untied)[0]


@pytest.mark.long
def test_rollout_only_and_train_only_share_one_format(direct):
    direct("debug rollout-only", "rolled", "--steps", "2")
    out = direct("debug train-only", "replayed", "--rollouts", str(direct.runs / "rolled" / "rollouts"))
    assert "no engines take part" in out
    assert [record["step"] for record in direct.steps("replayed")] == [0, 1]


@pytest.mark.long  # so it is in test_trainer_faults.py
def test_supervised_training_needs_no_engine(direct):
    job = Job(direct.root, direct.model, endpoints=None)
    job("train", "sft", sets=['algorithm.loss="sft"', "steps=6", "optimizer_steps_per_rollout=1", "eval.sets={}"])
    losses = [record["train/loss"] for record in job.steps("sft")]
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_a_reward_that_fails_too_often_ends_the_run_with_a_checkpoint_and_exit_code_1(direct):
    said = direct("train", "failing", sets=['reward.function="tests.e2e.rewards:raises_on_most"'], code=1)
    assert "max_failure_fraction" in said and "this reward is broken" in said and "Traceback" not in said
    assert (direct.runs / "failing" / "checkpoints" / "step_0").is_dir()


@pytest.mark.long  # the engine's masks are in vllm_contract.py, the trainer's in test_megatron_algorithms.py
def test_trainer_and_engine_are_equal_on_the_tokens_that_top_p_and_top_k_left(direct):
    direct("train", "truncated", sets=["steps=2", "sampling.top_p=0.9", "sampling.top_k=12"])
    for record in direct.steps("truncated"):
        assert 0 < record["train/logprob_abs_diff_mean"] < 1e-5 and record["train/entropy"] < math.log(12)
    samples = read_dump(direct.runs / "truncated" / "rollouts", 1).samples
    counts = [count for sample in samples for count in sample.sampling_mask_counts]
    assert len(counts) == sum(len(sample.response_ids) for sample in samples)
    assert min(counts) >= 1 and max(counts) <= 12 and len(set(counts)) > 1


def test_a_logprob_difference_between_trainer_and_engine_ends_the_run_before_the_optimizer_step(direct):
    said = direct("train", "differing", sets=["monitor.logprob_difference_limit=1e-12"], code=1)
    assert "trainer and engines disagree" in said and "no optimizer step was made" in said
    assert not direct.steps("differing")


BROKEN = [
    (["--set", "optimizer.lerning_rate=1"], "unknown key"),
    (["--set", "optimizer.lrr=1"], "did you mean optimizer.lr"),
    (["--rollout-external", "nonsense"], "malformed address"),
    (["--rollout-external", "127.0.0.1:9"], "127.0.0.1:9"),
    (["--set", "engines.mode=\"colocate\""], "contradict each other"),
    (["--set", "rollout.prompts_per_step=7"], "1 prompts remain"),
    (["--set", "model.path=/nonexistent"], "is not a directory"),
    (["--set", "reward.function=\"nowhere:f\""], "no module named"),
    (["--resume"], "holds no complete checkpoint"),
]


@pytest.mark.parametrize(("words", "message"), BROKEN)
def test_bad_input_is_one_clear_error_with_exit_code_2_and_nothing_started(direct, words, message):
    job = Job(direct.root, direct.model, endpoints=None) if "--rollout-external" in words else direct
    said = job("train", "refused", *words, code=2)
    assert message in said and "Traceback" not in said
    assert not (direct.runs / "refused" / "metrics.jsonl").exists()
    assert not (direct.runs / "refused" / "logs").exists()


def test_a_broken_line_and_an_unsupported_architecture_are_named(direct, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "label": "b"}\n{"prompt": \n')
    assert (
        "broken.jsonl" in (said := direct("train", "refused", sets=[f'data.train=["{tmp_path}/broken.jsonl"]'], code=2))
        and "2" in said
    )
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "vocab_size": 120}))
    assert "MambaForCausalLM" in direct("train", "refused", sets=[f"model.path={tmp_path}"], code=2)


def test_a_used_run_directory_is_refused_without_resume(routed, trained):
    before = (routed.runs / "trained" / "metrics.jsonl").read_bytes()
    assert "--resume" in routed("train", "trained", code=2)
    assert (routed.runs / "trained" / "metrics.jsonl").read_bytes() == before


def test_engines_of_another_model_are_refused(routed, direct):
    said = direct("train", "refused", sets=[f'model.path="{routed.model}"'], code=2)
    assert "serves another model" in said and "tie_word_embeddings" in said


def test_a_dry_run_shows_placement_and_origins_and_starts_nothing(direct):
    said = direct("train", "dry", "--dry-run", sets=["trainer.world_size=2"])
    assert "2 Ray bundles (2 trainer, 0 engine)" in said and "--set" in said and "optimizer.lr" in said
    assert not (direct.runs / "dry" / "logs").exists()
