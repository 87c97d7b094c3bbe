"""Training checkpoints: exact resume, other layouts, damage, crashes, and the export of trained weights."""

from __future__ import annotations

import json
from contextlib import closing

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest
from rltool.config.parallel import ParallelLayout
from rltool.errors import RltoolError
from rltool.models.weight_files import CARRIED
from tests.e2e.megatron_models import hf_logprobs, make_trainer, policy_batch, save_hf
from tests.e2e.test_megatron_trainer import LENGTHS, split, tensors

pytestmark = pytest.mark.e2e

LAYOUTS = {"one": (1, 1, 1), "dp2": (2, 1, 1), "tp2": (2, 2, 1), "pp2": (2, 1, 2)}
SETTINGS = {"optimizer": {"warmup_steps": 1, "decay_style": "cosine", "weight_decay": 0.1}}


def steps(trainer, batch, count):
    at = trainer.coordinates
    own = split(batch, at.dp_rank, at.layout.dp, 2)
    return [trainer.train_step(own, global_loss_tokens=batch.num_loss_tokens) for _ in range(count)]


# Cases: run in the ranks.


def case_train_and_save(place, path, tp, pp, batch, directory, settings):
    from rltool.checkpoints.torch_dist import save_checkpoint

    with closing(make_trainer(place, path, tp=tp, pp=pp, **settings)) as trainer:
        steps(trainer, batch, 2)
        extra = {"step": 2, "weight_version": "run:1:2", "position": [3, 4], "config": {"seed": 7}}
        save_checkpoint(trainer, directory, extra)
        saved = tensors(trainer)
        return saved, steps(trainer, batch, 2), trainer.parameter_hash()


def case_resume(place, path, tp, pp, batch, directory, settings):
    from rltool.checkpoints.torch_dist import load_checkpoint

    with closing(make_trainer(place, path, tp=tp, pp=pp, load=False, **settings)) as trainer:
        extra = load_checkpoint(trainer, directory)
        restored = tensors(trainer)
        return extra, restored, steps(trainer, batch, 2), trainer.parameter_hash()


def case_refused(place, path, directory):
    """The error of load_checkpoint on each rank, and whether any parameter changed before it."""
    from rltool.checkpoints.torch_dist import load_checkpoint

    with closing(make_trainer(place, path)) as trainer:
        before = trainer.parameter_hash()
        try:
            load_checkpoint(trainer, directory)
        except RltoolError as error:
            return type(error).__name__, str(error), trainer.parameter_hash() == before
    return None


def case_failing_save(place, path, directory):
    from rltool.checkpoints import saving
    from rltool.checkpoints.torch_dist import save_checkpoint

    def disk_full(*_, **__):
        raise OSError(28, "No space left on device")

    with closing(make_trainer(place, path)) as trainer:
        original, saving.carry = saving.carry, disk_full
        try:
            save_checkpoint(trainer, directory, {"step": 2})
        except (OSError, RltoolError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            saving.carry = original
    return None


def case_save_twice(place, path, directory):
    """The error of the second save under one name, and the processes that the first one left running."""
    from rltool.checkpoints.torch_dist import save_checkpoint

    with closing(make_trainer(place, path)) as trainer:
        save_checkpoint(trainer, directory, {"step": 1})
        children = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
        try:
            save_checkpoint(trainer, directory, {"step": 1})
        except RltoolError as error:
            return str(error), children
    return None


def case_train_and_export(place, path, tp, pp, batch, directory):
    from rltool.checkpoints.hf_export import export_hf

    with closing(make_trainer(place, path, tp=tp, pp=pp)) as trainer:
        steps(trainer, batch, 1)
        export_hf(trainer, directory, max_shard_bytes=150_000)
        return trainer.compute_logprobs([batch]), tensors(trainer)


def case_load(place, path, source, tp, pp, batch):
    from rltool.checkpoints.torch_dist import load_weights

    with closing(make_trainer(place, path, tp=tp, pp=pp, load=False)) as trainer:
        load_weights(trainer, source)
        return trainer.compute_logprobs([batch]), tensors(trainer)


# Tests.


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """By layout: what was saved after two steps, and what the run did in the next two."""
    base = tmp_path_factory.mktemp("resume")
    path, batch = save_hf(base / "hf", tied=True), policy_batch(LENGTHS)
    runs = {}
    for name, (world, tp, pp) in LAYOUTS.items():
        directory = base / name / "step_2"
        directory.parent.mkdir()
        runs[name] = directory, ranks.run(case_train_and_save, world, path, tp, pp, batch, directory, SETTINGS)
    return path, batch, runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_repeats_gradient_norms_and_parameter_hash_bit_for_bit(ranks, saved, layout):
    path, batch, runs = saved
    directory, first = runs[layout]
    world, tp, pp = LAYOUTS[layout]
    for before, after in zip(
        first, ranks.run(case_resume, world, path, tp, pp, batch, directory, SETTINGS), strict=True
    ):
        weights, metrics, hashed = before
        extra, restored, again, hashed_again = after
        assert extra["position"] == [3, 4]
        if weights is not None:
            assert all(torch.equal(weights[name], restored[name]) for name in weights)
        assert again == metrics and metrics[0]["train/grad_norm"] != metrics[1]["train/grad_norm"]
        assert hashed_again == hashed


def test_resume_in_bfloat16_keeps_the_fp32_master_weights(ranks, tmp_path):
    path, batch = save_hf(tmp_path / "hf"), policy_batch(LENGTHS)
    # Steps far below bf16's resolution: without the master weights a resumed run would forget them.
    settings = {"dtype": "bfloat16", "optimizer": {"lr": 1e-5}}
    _, metrics, hashed = ranks.run(case_train_and_save, 2, path, 2, 1, batch, tmp_path / "step_2", settings)[0]
    _, _, again, hashed_again = ranks.run(case_resume, 2, path, 2, 1, batch, tmp_path / "step_2", settings)[0]
    assert again == metrics and hashed_again == hashed


@pytest.mark.parametrize(("source", "target"), [("tp2", "pp2"), ("pp2", "one"), ("one", "tp2"), ("dp2", "one")])
def test_checkpoint_loads_under_another_layout(ranks, saved, source, target):
    """Also with the vocabulary padded (131 is odd) under tensor parallelism and not elsewhere."""
    path, batch, runs = saved
    directory, first = runs[source]
    world, tp, pp = LAYOUTS[target]
    _, restored, again, _ = ranks.run(case_resume, world, path, tp, pp, batch, directory, SETTINGS)[0]
    weights, metrics, _ = first[0]
    assert_resumed(weights, metrics, restored, again)


def assert_resumed(weights, metrics, restored, again):
    """Under another layout than that of the save."""
    assert all(torch.equal(weights[name], restored[name]) for name in weights)
    # The second step after the resume depends on Adam's moments, the learning rate and the first.
    assert again[1]["train/grad_norm"] == pytest.approx(metrics[1]["train/grad_norm"], rel=1e-3)
    assert again[0]["train/grad_norm"] == pytest.approx(metrics[0]["train/grad_norm"], rel=1e-5)
    assert [step["train/lr"] for step in again] == [step["train/lr"] for step in metrics]


WITH_EXPERTS = {
    "one": (1, {}), "pp2": (2, {"pp": 2}), "ep2": (2, {"ep": 2}),
    "tp2": (2, {"tp": 2, "trainer": {"sequence_parallel": True}}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize(("source", "target"), [("tp2", "pp2"), ("ep2", "one"), ("pp2", "ep2"), ("one", "tp2")])
def test_experts_latent_attention_and_sinks_resume_under_another_layout_with_adams_moments(
    ranks, tmp_path, kind, source, target
):
    path, batch, directory = save_hf(tmp_path / "hf", kind, tied=False), policy_batch(LENGTHS), tmp_path / "step_2"

    def run(case, layout):
        world, options = WITH_EXPERTS[layout]
        options = {"tp": 1, "pp": 1, **options}
        settings = SETTINGS | {name: option for name, option in options.items() if name not in ("tp", "pp")}
        return ranks.run(case, world, path, options["tp"], options["pp"], batch, directory, settings)[0]

    weights, metrics, _ = run(case_train_and_save, source)
    _, restored, again, _ = run(case_resume, target)
    assert_resumed(weights, metrics, restored, again)


def test_configured_learning_rate_wins_over_the_saved_one(ranks, saved):
    path, batch, runs = saved
    changed = {"optimizer": {**SETTINGS["optimizer"], "lr": 5e-4}}
    _, _, again, _ = ranks.run(case_resume, 1, path, 1, 1, batch, runs["one"][0], changed)[0]
    for found, before in zip(again, runs["one"][1][0][1], strict=True):
        assert found["train/lr"] == pytest.approx(before["train/lr"] / 2)


def test_manifest_tells_what_was_saved_and_latest_points_at_it(saved):
    directory, _ = saved[2]["tp2"]
    described = manifest.read(directory)
    assert (described.kind, described.step, described.weight_version) == ("training", 2, "run:1:2")
    assert described.layout == ParallelLayout(2, tp=2) and described.config == {"seed": 7}
    manifest.verify(directory, described)
    assert directories.latest_checkpoint(directory.parent) == directory
    assert {path.name for path in directory.parent.iterdir()} == {"step_2", "latest"}


def test_damaged_checkpoint_is_refused_on_every_rank_before_anything_is_loaded(ranks, saved, tmp_path):
    import shutil

    path, _, runs = saved
    shutil.copytree(runs["dp2"][0], copy := tmp_path / "step_2")
    target = max((copy / "torch_dist").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    (kind, text, untouched), (other_kind, _, other_untouched) = ranks.run(case_refused, 2, path, copy)
    assert kind == "CheckpointDamaged" and f"{target.name} is not the file that was saved" in text
    assert other_kind == "OtherRankFailed" and untouched and other_untouched


def test_checkpoint_of_another_model_and_weights_without_training_state_are_refused(ranks, saved, tmp_path):
    from rltool.checkpoints.convert import hf_to_torch_dist

    path, _, runs = saved
    other = save_hf(tmp_path / "other", tied=False)
    kind, text, _ = ranks.run(case_refused, 1, other, runs["one"][0])[0]
    assert kind == "UsageError" and "holds another model" in text
    hf_to_torch_dist(path, tmp_path / "dist", verify=False)
    kind, text, _ = ranks.run(case_refused, 1, path, tmp_path / "dist")[0]
    assert kind == "UsageError" and "holds weights only" in text


def test_failed_save_leaves_the_last_good_checkpoint_and_nothing_else(ranks, saved, tmp_path):
    path = saved[0]
    message, children = ranks.run(case_save_twice, 2, path, tmp_path / "step_1")[0]
    assert "exists already" in message
    assert not [child for child in children if "resource_tracker" not in child], "a save left processes behind"
    errors = ranks.run(case_failing_save, 2, path, tmp_path / "step_2")
    assert all("DiskFull" in error and "No space left" in error and "bytes are free" in error for error in errors)
    assert directories.latest_checkpoint(tmp_path) == tmp_path / "step_1"
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "latest"}


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_are_those_that_were_trained(ranks, tmp_path, tp, pp, tied):
    from transformers import AutoModelForCausalLM

    path, batch = save_hf(tmp_path / "hf", tied=tied), policy_batch(LENGTHS)
    results = ranks.run(case_train_and_export, 2, path, tp, pp, batch, tmp_path / "out")
    trained, (logprobs,) = results[0][1], [result[0] for result in results if result[0] is not None]
    (again, restored), *_ = ranks.run(case_load, 1, path, tmp_path / "out", 1, 1, batch)
    assert all(torch.equal(trained[name], restored[name]) for name in trained)
    torch.testing.assert_close(again[0], logprobs[0], rtol=0, atol=1e-5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = torch.cat([hf_logprobs(model, t, 1.0) for t in batch.tokens.split(batch.lengths.tolist())])
    torch.testing.assert_close(logprobs[0], expected, rtol=0, atol=2e-5)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_layers_that_predict_more_tokens_go_through_a_runs_checkpoint_and_export_unchanged(ranks, tmp_path, kind):
    """Behind the last layer, and apart: they keep their dtype, whatever the model's is."""
    path, batch = save_hf(tmp_path / "hf", kind, tied=False), policy_batch(LENGTHS)
    beginning = {"deepseek_v3": "model.layers.4.", "qwen3_next": "mtp."}[kind]
    carried = {f"{beginning}norm.weight": torch.randn(7), f"{beginning}fc.weight": torch.randn(3, 5).bfloat16()}
    file = path / "model.safetensors"
    save_file(load_file(file) | carried, file, {"format": "pt"})
    ranks.run(case_train_and_save, 1, path, 1, 1, batch, tmp_path / "step_2", SETTINGS)
    ranks.run(case_train_and_export, 1, path, 1, 1, batch, tmp_path / "out")
    files = (tmp_path / "out").glob("*.safetensors")
    of_export = {name: tensor for part in files for name, tensor in load_file(part).items()}
    for found in (load_file(tmp_path / "step_2" / CARRIED), of_export):
        found = {name: tensor for name, tensor in found.items() if name.startswith(beginning)}
        assert found.keys() == carried.keys()
        assert all(found[name].dtype is t.dtype and torch.equal(found[name], t) for name, t in carried.items())


def test_weights_load_from_a_converted_directory_and_from_a_training_checkpoint(ranks, saved, tmp_path):
    from rltool.checkpoints.convert import hf_to_torch_dist

    path, batch, runs = saved
    hf_to_torch_dist(path, tmp_path / "dist", verify=False)
    direct = ranks.run(case_load, 2, path, path, 2, 1, batch)[0]
    # The configured model path may be the torch_dist directory itself: it is self-contained.
    converted = ranks.run(case_load, 2, tmp_path / "dist", tmp_path / "dist", 2, 1, batch)[0]
    assert torch.equal(direct[0][0], converted[0][0])
    directory, first = runs["pp2"]
    _, restored = ranks.run(case_load, 2, path, directory, 2, 1, batch)[0]
    assert all(torch.equal(restored[name], first[0][0][name]) for name in restored)
