"""Algorithms with more than one model, through the command: `debug train-only` on recorded rollouts, with no engine."""

from __future__ import annotations

import math
import random
import re
import statistics
from array import array
from pathlib import Path

import pytest
import torch

from rltool.rollout.measure.dump import read_dump, write_dump
from rltool.rollout.sample import Sample, SampleStatus
from tests.e2e.job import Job, write_job
from tests.tiny_models import VOCAB_SIZE, write_tiny_qwen2

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Job:
    """A job whose rollouts are in `recorded`: random tokens, with log-probabilities as of a near-uniform engine."""
    root = tmp_path_factory.mktemp("algorithms")
    generator = random.Random(0)
    for step in range(STEPS):
        samples = []
        for group in range(8):
            prompt = [generator.randrange(VOCAB_SIZE) for _ in range(5)]
            for index in range(4):
                length = generator.randint(1, 12)
                sample = Sample(
                    group_id=8 * step + group,
                    index=index,
                    prompt_index=group,
                    prompt_ids=prompt,
                    status=SampleStatus.COMPLETED,
                )
                sample.response_ids = [generator.randrange(VOCAB_SIZE) for _ in range(length)]
                sample.response_mask = [1] * length
                sample.response_logprobs = [-math.log(VOCAB_SIZE) + generator.gauss(0, 0.2) for _ in range(length)]
                sample.reward = generator.random()
                samples.append(sample)
        write_dump(root / "recorded", step=step, seed=3, samples=samples)
    return write_job(root, tiny_tied_dir, None)


def replay(job: Job, run: str, *more: str, sets: list[str], rollouts: Path | None = None) -> str:
    """The parameter hash at the end."""
    return hash_of(
        job(
            "debug train-only",
            run,
            "--rollouts",
            str(rollouts or job.root / "recorded"),
            *more,
            sets=["optimizer_steps_per_rollout=1", *sets],
        )
    )


def hash_of(said: str) -> str:
    return re.search(r"sha256:(\w+)", said).group(1)


@torch.no_grad()
def response_logprobs(path: Path, samples: list[Sample]) -> torch.Tensor:
    """Of all response tokens, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    found = []
    for sample in samples:
        tokens = torch.tensor(sample.prompt_ids + sample.response_ids)
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)
        found.append(logprobs[len(sample.prompt_ids) - 1 :])
    return torch.cat(found)


@pytest.mark.long  # resumes are also in the test of PPO, a teacher in the next one
def test_distillation_from_a_teacher_trains_and_resumes_bit_equally(job, tmp_path):
    teacher = write_tiny_qwen2(tmp_path / "teacher", tied=True, seed=2)
    sets = ["algorithm.advantage=distill", f"model.teacher_path={teacher}"]
    whole = replay(job, "distilled", sets=sets)
    replay(job, "halved", "--steps", "1", sets=sets)
    assert replay(job, "halved", "--resume", sets=sets) == whole
    samples = read_dump(job.root / "recorded", 0).samples
    advantages = response_logprobs(teacher, samples) - response_logprobs(job.model, samples)
    first = job.steps("distilled")[0]
    assert first["train/grad_norm"] > 0 and advantages.std() > 0.1
    assert first["train/advantage_mean"] == pytest.approx(advantages.mean().item(), abs=1e-5)
    assert first["train/advantage_std"] == pytest.approx(advantages.std().item(), rel=1e-4)


@torch.no_grad()
def response_distributions(path: Path, sample: Sample) -> torch.Tensor:
    """[response tokens, V] log-probabilities, by transformers."""
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor(sample.prompt_ids + sample.response_ids)
    logits = AutoModelForCausalLM.from_pretrained(path)(tokens[None]).logits[0]
    return logits[len(sample.prompt_ids) - 1 : -1].log_softmax(-1)


DISTILLED = ["algorithm.advantage=none", "algorithm.distill_kl_coef=1.0", "algorithm.distill_top_k=4"]


@pytest.mark.long  # also in test_megatron_algorithms.py and, through a run's actors, in test_wide_fields.py
def test_distillation_by_a_loss_trains_and_is_the_same_from_a_recording(job, tmp_path):
    teacher, k = write_tiny_qwen2(tmp_path / "teacher", tied=True, seed=2), 4
    replay(job, "loss", sets=[*DISTILLED, f"model.teacher_path={teacher}"])
    divergences = []
    for step in range(STEPS):
        samples = read_dump(job.root / "recorded", step).samples
        for sample in samples:
            p, q = (response_distributions(path, sample) for path in (teacher, job.model))
            best = p.topk(k, dim=-1)
            sample.teacher_topk_ids = array("i", best.indices.flatten().tolist())
            sample.teacher_topk_logprobs = array("f", best.values.flatten().tolist())
            others = [d.exp().scatter(-1, best.indices, 0.0).sum(-1).log() for d in (p, q)]
            outcomes = best.values.exp() * (best.values - q.gather(-1, best.indices))
            divergences += (outcomes.sum(-1) + others[0].exp() * (others[0] - others[1])).tolist() if step == 0 else []
        write_dump(tmp_path / "scored", step=step, seed=3, samples=samples)
    first = job.steps("loss")[0]
    assert first["train/grad_norm"] > 0 and first["train/advantage_std"] == 0
    assert first["train/distill_kl"] == pytest.approx(statistics.fmean(divergences), rel=1e-4)
    served = [*DISTILLED, "model.teacher=big", f"models.big.path={teacher}"]
    replay(job, "loss-served", sets=served, rollouts=tmp_path / "scored")
    # Adam's first step is the sign of the gradient, also of rounding errors.
    for ours, theirs, within in zip(job.steps("loss"), job.steps("loss-served"), (1e-4, 1e-2), strict=True):
        for name in ("train/loss", "train/distill_kl", "train/grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=within)


@pytest.mark.long  # a teacher adds nothing to a checkpoint; resumes are also below and in test_train.py
def test_distillation_by_a_loss_resumes_bit_equally(job, tmp_path):
    teacher = write_tiny_qwen2(tmp_path / "teacher", tied=True, seed=2)
    sets = [*DISTILLED, f"model.teacher_path={teacher}"]
    whole = replay(job, "loss-whole", sets=sets)
    replay(job, "loss-halved", "--steps", "1", sets=sets)
    assert replay(job, "loss-halved", "--resume", sets=sets) == whole


@pytest.mark.long
def test_kl_in_the_reward_corrections_and_bonus_reach_two_ranks_and_do_not_depend_on_them(job):
    sets = [
        "algorithm.advantage=reinforce_pp", "algorithm.kl={kind='reward', coef=0.1, estimator='k1'}",
        "algorithm.entropy={kind='bonus', coef=0.01}", "algorithm.is_weights=token",
        "algorithm.is_weights.cap=1.1", "algorithm.is_mask=geometric", "algorithm.is_mask.low=0.9",
        "algorithm.is_mask.high=1.1", "algorithm.loss_reduction=group", "algorithm.overlong_buffer=4",
    ]  # fmt: skip
    replay(job, "one", sets=sets)
    replay(job, "two", sets=[*sets, "trainer.world_size=2", "trainer.cpus_per_rank=0.5"])
    for one, two in zip(job.steps("one"), job.steps("two"), strict=True):
        for name in (
            "loss",
            "grad_norm",
            "kl",
            "entropy",
            "is_weight_mean",
            "masked_fraction",
            "overlong_fraction",
            "advantage_std",
            "ratio_mean",
            "clip_fraction",
        ):
            assert two[f"train/{name}"] == pytest.approx(one[f"train/{name}"], rel=1e-5, abs=1e-6), name
        assert (
            one["train/masked_fraction"] > 0
            and one["train/is_truncated_fraction"] > 0
            and one["train/overlong_fraction"] > 0
        )
    first, second = job.steps("one")
    assert first["train/kl"] == pytest.approx(0, abs=1e-6) and second["train/kl"] != 0


@pytest.mark.long
@pytest.mark.parametrize("entropy", ["{kind='bonus', target=9.0}", "{kind='high_entropy', fraction=0.5}"])
def test_steered_weights_a_following_reference_and_chosen_tokens_resume_bit_equally_and_do_not_depend_on_ranks(
    job, entropy
):
    sets = [
        "epochs_per_rollout=2", "algorithm.kl={kind='loss', coef=0.1, target=1e-6, reference_update_steps=1}",
        "algorithm.off_policy_mask_threshold=0.05", f"algorithm.entropy={entropy}",
    ]  # fmt: skip
    run = "steered-bonus" if "bonus" in entropy else "steered-chosen"
    whole = replay(job, run, sets=sets)
    replay(job, f"{run}-halved", "--steps", "1", sets=sets)
    assert replay(job, f"{run}-halved", "--resume", sets=sets) == whole
    replay(job, f"{run}-two", sets=[*sets, "trainer.world_size=2", "trainer.cpus_per_rank=0.5"])
    first, second = job.steps(run)
    assert first["train/kl_coef"] == 0.1 and second["train/kl_coef"] == pytest.approx(0.102)
    assert 0 < first["train/off_policy_masked_fraction"] < 1
    if "bonus" in entropy:
        assert first["train/entropy_coef"] == 0.0 and second["train/entropy_coef"] == pytest.approx(0.005)
        measured = "entropy_coef"
    else:
        assert 0.4 < first["train/top_entropy_fraction"] < 0.6
        measured = "top_entropy_fraction"
    for one, two in zip(job.steps(run), job.steps(f"{run}-two"), strict=True):
        for name in ("loss", "grad_norm", "kl", "kl_coef", measured):
            assert two[f"train/{name}"] == pytest.approx(one[f"train/{name}"], rel=1e-4, abs=1e-6), name


@pytest.mark.long  # test_critic.py has the critic beside the policy, its steps and its checkpoints
def test_ppo_trains_policy_and_critic_on_fake_data_and_resumes_bit_equally(job):
    sets = [
        "algorithm.advantage=gae",
        "algorithm.kl={kind='reward', coef=0.05}",
        "critic.lr=1e-3",
        "critic.warmup_rollouts=1",
        "checkpoint.async_save=true",
    ]

    def fake(run: str, *more: str) -> str:
        return hash_of(job("debug train-only", run, "--fake-data", *more, sets=["steps=4", *sets]))

    whole = fake("ppo")
    # A shorter run of the same schedule: stopped is as good as ended, since learning rates are constant.
    fake("ppo-halved", "--steps", "2")
    assert fake("ppo-halved", "--resume") == whole
    first, *rest = [record for record in job.metrics("ppo") if "train/value_loss" in record]
    assert (
        "train/grad_norm" not in first
        and first["train/explained_variance"] is not None
        and first["train/value_mean"] == 0
    )
    assert len(rest) == 3 and len({record["train/value_loss"] for record in (first, *rest)}) == 4
    for record in rest:
        assert (
            record["train/grad_norm"] > 0 and record["train/critic_grad_norm"] > 0 and record["train/value_mean"] != 0
        )
        assert 0 <= record["train/value_clip_fraction"] <= 1 and record["train/explained_variance"] < 1
    halved = [record for record in job.metrics("ppo-halved") if "train/value_loss" in record]
    assert [record["train/value_loss"] for record in halved] == [
        record["train/value_loss"] for record in (first, *rest)
    ]


@pytest.mark.long
def test_ppo_does_not_depend_on_the_ranks(job):
    sets = ["algorithm.advantage=gae", "critic.lr=1e-3", "critic.updates_per_optimizer_step=2"]
    replay(job, "ppo-one", sets=sets)
    replay(job, "ppo-two", sets=[*sets, "trainer.world_size=2", "trainer.cpus_per_rank=0.5"])
    for one, two in zip(job.steps("ppo-one"), job.steps("ppo-two"), strict=True):
        for name in (
            "loss",
            "grad_norm",
            "value_loss",
            "value_clip_fraction",
            "value_mean",
            "explained_variance",
            "critic_grad_norm",
            "advantage_std",
        ):
            assert two[f"train/{name}"] == pytest.approx(one[f"train/{name}"], rel=1e-5, abs=1e-6), name
        assert one["train/value_loss"] > 0


def test_an_unusable_algorithm_is_refused_before_anything_starts(job):
    said = job("debug train-only", "refused", "--rollouts", str(job.root / "recorded"), sets=["critic.lr=1e-4"], code=2)
    assert (
        'it needs algorithm.advantage = "gae"' in said.replace("\n", " ")
        and not (job.runs / "refused" / "metrics.jsonl").exists()
    )
