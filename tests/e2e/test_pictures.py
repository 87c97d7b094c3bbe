"""Samples with pictures: the trainer against transformers, in its layouts."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from rltool.algorithms.batch import Ragged
from rltool.errors import TrainingStopped
from tests.e2e.megatron_models import hf_model, make_trainer
from tests.e2e.pictures import PAD, batch_with_pictures, hf_picture_logprobs, picture, save_model
from tests.e2e.test_model_families import case, on_disk

pytestmark = pytest.mark.e2e

FILES = [picture(37, 90, 1), picture(200, 50, 2), picture(64, 64, 3), picture(131, 117, 4)]
SAMPLES = [
    (12, []),
    (20, FILES[:1]),
    (9, FILES[1:4]),
    (15, [FILES[0], FILES[0]]),
    (30, []),
    (7, FILES[3:]),
    (3, []),
    (5, [FILES[2]]),
]
"""None, one and several pictures of odd sizes; one of them three times."""
LAYOUTS = [
    (1, {}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "trainer": {"sequence_parallel": True}}),
    (2, {"pp": 2, "trainer": {"recompute": "full"}}),
    (2, {}),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """(directory, batch, log-probabilities, loss and gradients by transformers)."""
    path = save_model(tmp_path_factory.mktemp("pictures"))
    model, batch = hf_model("qwen3_vl", tied=False), batch_with_pictures(path, SAMPLES)
    rows = zip(batch.tokens.split(batch.lengths.tolist()), SAMPLES, strict=True)
    logprobs = torch.cat([hf_picture_logprobs(model, path, tokens, files) for tokens, (_, files) in rows])
    at = batch.loss_mask > 0
    loss = -(batch.loss_weights[at] * logprobs[at]).sum() / at.sum()
    loss.backward()
    language = {name: p for name, p in model.named_parameters() if ".visual." not in name}
    norm = torch.nn.utils.get_total_norm([p.grad for p in language.values()])
    with torch.no_grad():
        for parameter in language.values():
            parameter.copy_(parameter.grad)
    model.save_pretrained(gradients := tmp_path_factory.mktemp("gradients"))
    return path, batch, logprobs.detach(), float(loss.detach()), float(norm), on_disk(gradients)


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=["one", "tp", "sequence", "pp", "dp"])
def test_logprobs_and_gradients_of_samples_with_pictures_are_those_of_transformers(ranks, expected, world, layout):
    path, batch, logprobs, loss, norm, gradients = expected
    results = ranks.run(case, world, path, batch, layout)
    for _, found, *_ in results:
        if found is not None:
            torch.testing.assert_close(torch.cat(found), logprobs, rtol=0, atol=1e-5)
    metrics = results[0][2]
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in gradients.items():
        error = (results[0][3][name] - gradient).norm()
        assert error <= 1e-5 * max(gradient.norm(), 0.01 * norm), f"gradient of {name} is off by {error}"


def case_refused(place, path, batch):
    """(log-probabilities of the second sample as it is, with another picture, with none in its places), what is said of
    samples that disagree."""
    with closing(make_trainer(place, path)) as trainer:
        sample = batch.select([1])
        places, files = sample.picture_places.values.tolist(), sample.picture_files
        other = torch.frombuffer(bytearray(picture(37, 90, 99)), dtype=torch.uint8)
        changes = {
            "another": {"picture_files": Ragged(other, torch.tensor([len(other)]))},
            "moved": {"picture_places": Ragged(torch.tensor([places[0] + 1, *places[1:]]), torch.tensor([4]))},
            "turned": {"picture_places": Ragged(torch.tensor([places[i] for i in (0, 2, 1, 3)]), torch.tensor([4]))},
            "cut": {"picture_files": Ragged(torch.cat([files.values, other]), files.lengths + len(other))},
            "text": {"tokens": torch.where(sample.tokens == PAD, 5, sample.tokens)},
        }  # fmt: skip
        changes["another"]["picture_places"] = Ragged(torch.tensor([*places[:3], len(other)]), torch.tensor([4]))
        found, said = [trainer.compute_logprobs([sample])[0]], {}
        for name, change in changes.items():
            try:
                found += trainer.compute_logprobs([sample.replace(**change)])
            except TrainingStopped as error:
                said[name] = str(error)
        return found, said


def test_another_picture_changes_what_follows_and_a_sample_that_disagrees_is_refused_by_name(ranks, expected):
    path, batch, logprobs, *_ = expected
    [(found, said)] = ranks.run(case_refused, 1, path, batch)
    own, another = found
    torch.testing.assert_close(own, logprobs.split(batch.lengths.tolist())[1], rtol=0, atol=1e-5)
    first = int((batch.select([1]).tokens == PAD).nonzero()[0])
    assert torch.equal(own[: first + 1], another[: first + 1]) and (own - another)[first + 1 :].abs().max() > 0.1
    assert "placeholders" in said["moved"] and "placeholders" in said["text"]
    assert "in the rollout, and" in said["turned"] and "image processor of model.path" in said["turned"]
    assert "bytes of pictures" in said["cut"]
    assert said.keys() == {"moved", "text", "turned", "cut"}
