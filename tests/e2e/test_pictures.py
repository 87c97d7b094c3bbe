"""Samples with pictures: the trainer against transformers, in its layouts, and against the real vLLM."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
from contextlib import closing

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rltool.algorithms.batch import Ragged
from rltool.config.data import DataConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, ModelEndpoints
from rltool.engines.types import Completion, SamplingParams, VersionSpan
from rltool.errors import PicturesDiffer, TrainingStopped
from rltool.models.pictures import Place, places_of
from rltool.models.registry import family_for, read_hf_config
from rltool.quickstart.tiny_model import PICTURE_TEMPLATE, make_tiny_vision_model
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.data.rows import RowParser
from rltool.rollout.generate import GenerateContext, continue_response, fill_group
from rltool.rollout.groups import new_samples
from rltool.rollout.measure.dump import read_dump
from rltool.rollout.pictures import PictureReader, picture_file
from rltool.rollout.tokenizer import load_tokenizer
from tests.e2e.engines import serving_sglang, serving_vllm
from tests.e2e.job import Job
from tests.e2e.megatron_models import hf_model, make_trainer, save_as_released
from tests.e2e.pictures import PAD, batch_with_pictures, hf_picture_logprobs, picture, save_model
from tests.e2e.test_megatron_trainer import logprobs_of_both_cuts
from tests.e2e.test_model_families import case, on_disk
from tests.e2e.weights import Sender, tensors_of

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
SEQUENCE = {"sequence_parallel": True}
CASES = [
    *(
        pytest.param("qwen3_vl", *layout, id=name)
        for layout, name in zip(LAYOUTS, ("one", "tp", "sequence", "pp", "dp"), strict=True)
    ),
    pytest.param("qwen3_vl_moe", 2, {"tp": 2, "trainer": SEQUENCE}, id="experts-tp"),
    *(
        pytest.param("qwen3_vl_moe", world, layout, id=f"experts-{name}", marks=pytest.mark.long)
        for name, (world, layout) in {
            "one": (1, {}), "pp": (2, {"pp": 2, "trainer": {"recompute": "full"}}), "ep": (2, {"ep": 2}),
        }.items()
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def expected(request, tmp_path_factory):
    """Of this kind: (directory, batch, log-probabilities, loss and gradients by transformers)."""
    path = save_model(tmp_path_factory.mktemp("pictures"), request.param)
    model, batch = hf_model(request.param, tied=False), batch_with_pictures(path, SAMPLES)
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
    save_as_released(model, gradients := tmp_path_factory.mktemp("gradients"))
    return path, batch, logprobs.detach(), float(loss.detach()), float(norm), on_disk(gradients)


@pytest.mark.parametrize(("expected", "world", "layout"), CASES, indirect=["expected"])
def test_logprobs_and_gradients_of_samples_with_pictures_are_those_of_transformers(ranks, expected, world, layout):
    path, batch, logprobs, loss, norm, gradients = expected
    results = ranks.run(case, world, path, batch, layout)
    for _, _, found, *_ in results:
        if found is not None:
            torch.testing.assert_close(torch.cat(found), logprobs, rtol=0, atol=1e-5)
    metrics = results[0][3]
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in gradients.items():
        error = (results[0][4][name] - gradient).norm()
        assert error <= 1e-5 * max(gradient.norm(), 0.01 * norm), f"gradient of {name} is off by {error}"


@pytest.mark.parametrize("expected", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_in_larger_micro_batches_where_nothing_is_trained_each_sample_sees_its_own_pictures(
    ranks, expected, world, layout
):
    path, batch, logprobs, *_ = expected
    found = logprobs_of_both_cuts(ranks, world, path, batch, {**layout, "temperature": 1.0})
    torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("expected", ["qwen3_vl"], indirect=True)
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


def case_logprobs(place, path, batch):
    with closing(make_trainer(place, path)) as trainer:
        return torch.cat(trainer.compute_logprobs([batch.select([i]) for i in range(batch.num_samples)]))


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    """Directories of two language models beside one tower, and the second's tensors as a trainer sends them."""
    first, second = (make_tiny_vision_model(tmp_path_factory.mktemp(f"model{seed}"), seed=seed) for seed in range(2))
    models = [AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32) for path in (first, second)]
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in models[1].model.language_model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    models[1].model.visual.load_state_dict(models[0].model.visual.state_dict())
    models[1].save_pretrained(second)
    sent = {name: t for name, t in tensors_of(models[1]).items() if ".visual." not in name}
    return first, second, sent


@pytest.fixture(scope="module")
def engine(two_models, tmp_path_factory):
    with serving_vllm(two_models[0], tmp_path_factory.mktemp("vllm")) as running:
        yield running


@pytest.fixture(scope="module")
def sglang(two_models, tmp_path_factory):
    with serving_sglang(two_models[0], tmp_path_factory.mktemp("sglang"), max_model_len=256) as running:
        yield running


def rows_with_pictures(directory):
    """Rows with none, one and several pictures: paths, a data URL, bytes, a palette with transparency."""
    for number, file in enumerate(FILES):
        (directory / f"{number}.png").write_bytes(file)
    with Image.open(io.BytesIO(FILES[0])) as image:
        image.convert("P").save(directory / "palette.png", transparency=3)
        image.save(directory / "turned.jpg", exif=exif_of_a_turned_camera())
    url = "data:image/png;base64," + base64.b64encode(FILES[3]).decode()
    see = {"type": "image"}
    return [
        chat("none of them"),
        chat("one ", {"type": "image", "image": "0.png"}, " then text"),
        chat({"type": "image_url", "image_url": {"url": url}}, "and", {"type": "image", "path": "1.png"}, "and", see)
        | {"images": ["2.png"]},
        chat(see, see, "twice the same") | {"images": ["0.png", "0.png"]},
        chat(see, "palette") | {"images": [{"bytes": (directory / "palette.png").read_bytes(), "path": None}]},
        chat(see, "turned") | {"images": ["turned.jpg"]},
    ]


def chat(*parts):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": parts}]}


def exif_of_a_turned_camera():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def reader_of(path, root):
    return PictureReader(family_for(read_hf_config(path)).pictures, path, root)


def prompts_of(path, root):
    tokenizer = load_tokenizer(path, pictures=reader_of(path, root))
    parser = RowParser(tokenizer, DataConfig(media_root=root))
    return tokenizer, [parser.prompt(row, f"row {i}", i) for i, row in enumerate(rows_with_pictures(root))]


def test_engine_and_trainer_agree_on_samples_with_pictures_before_and_after_an_update(
    ranks, two_models, engine, tmp_path
):
    first, second, sent = two_models
    tokenizer, prompts = prompts_of(first, tmp_path)
    counts = [len(prompt.picture_places) // len(Place._fields) for prompt in prompts]
    assert counts == [0, 1, 3, 2, 1, 1]

    async def sampled(client, seed):
        async def generate(request):
            return await client.generate(engine.endpoint, request, timeout=60)

        params = SamplingParams(max_tokens=12, ignore_eos=True)
        context = GenerateContext(generate, params, tokenizer.vocab_size)
        groups = [new_samples(i, prompt, count=2, run_seed=seed) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(fill_group(group, context) for group in groups))
        # One more, taken up where it was aborted: the engine gets the pictures and what was sampled.
        again = new_samples(99, prompts[2], count=1, run_seed=seed)[0]
        again.append_response_tokens(Completion((5, 6), (-1.0, -2.0), "abort", (VersionSpan("v", 0, 2),)))
        await continue_response(again, context)
        assert len(again.response_ids) == 12
        samples = [*(sample for group in groups for sample in group), again]
        for sample in samples:
            sample.reward = 0.0
        return samples_to_batch(samples)

    async def both():
        async with EngineClient() as client:
            before = await sampled(client, 1)
            await Sender(client, engine).gloo(sent, "updated")
            return before, await sampled(client, 2)

    for path, batch in zip((first, second), asyncio.run(both()), strict=True):
        [logprobs] = ranks.run(case_logprobs, 1, path, batch)
        own = batch.loss_mask.bool() & (batch.rollout_logprobs != -1.0) & (batch.rollout_logprobs != -2.0)
        assert own.sum() == 12 * 12 + 10
        assert (logprobs - batch.rollout_logprobs)[own].abs().max() <= 1e-5
        assert logprobs[own].std() > 0.1


@pytest.mark.parametrize("of", ["engine", pytest.param("sglang", marks=pytest.mark.long)])
def test_an_engine_that_expands_a_picture_to_other_tokens_is_refused(two_models, request, tmp_path, of):
    """One that was started with other settings of the image processor."""
    engine = request.getfixturevalue(of)
    other = tmp_path / "other"
    shutil.copytree(two_models[0], other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] //= 4
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer, prompts = prompts_of(other, tmp_path)
    [sample] = new_samples(0, prompts[1], count=1, run_seed=0)

    async def ask():
        async with EngineClient() as client:
            generate = lambda request: client.generate(engine.endpoint, request, timeout=60)  # noqa: E731
            await fill_group([sample], GenerateContext(generate, SamplingParams(4), tokenizer.vocab_size))

    with pytest.raises(PicturesDiffer, match="expanded a prompt with 1 pictures to") as caught:
        asyncio.run(ask())
    assert "prompt 1 (" in caught.value.__notes__[0]


ROLES = (
    PICTURE_TEMPLATE.replace("{% if message.content is", "{{ message.role }} {% if message.content is").removesuffix(
        "{% endfor %}"
    )
    + "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


AGENT = 'agent = "tests.e2e.agents:with_pictures"\nagent_workers = 1'
ENVIRONMENT = 'environment = "tests.e2e.agents:Seeing"'


@pytest.mark.parametrize(
    ("of", "plays", "turns"),
    [
        pytest.param("engine", AGENT, 2, id="agent"),
        pytest.param("engine", ENVIRONMENT, 3, id="environment"),
        pytest.param("sglang", ENVIRONMENT, 3, id="sglang", marks=pytest.mark.long),
    ],
)
def test_pictures_of_several_turns_are_trained_as_the_engine_saw_them(two_models, request, tmp_path, of, plays, turns):
    """Recorded by the run's gateway, or shown by an environment, against transformers and the trainer; in the second
    step with other weights."""
    engine = request.getfixturevalue(of)
    path = shutil.copytree(two_models[0], tmp_path / "model")
    (path / "chat_template.jinja").write_text(ROLES)
    if plays == AGENT:
        urls = ["data:image/png;base64," + base64.b64encode(file).decode() for file in FILES]
        rows = [{"prompt": "x", "metadata": {"pictures": [urls[i], urls[(i + 1) % 4]]}} for i in range(4)]
        in_prompt = 1
    else:
        (tmp_path / "media").mkdir()
        rows, in_prompt = [of_environment(tmp_path / "media", i) for i in range(4)], 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Endpoints(models={"policy": ModelEndpoints(engines=(engine.endpoint,))}).save(tmp_path / "endpoints.json")
    (tmp_path / "run.toml").write_text(f"""
seed = 3
steps = 2
[model]
path = "{path}"
[trainer]
torch_threads = 1
[optimizer]
lr = 1e-3
[data]
train = ["{tmp_path}/rows.jsonl"]
media_root = "{tmp_path}/media"
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_turn_tokens = 8
dump = true
{plays}
[sampling]
max_prompt_tokens = 100
max_response_tokens = {100 if plays == AGENT else 150}
stop_token_ids = {[] if plays == AGENT else list(range(3, 24))}  # a reply that is cut ends an environment's episode
[monitor]
logprob_difference_limit = 1e-5
""")
    job = Job(tmp_path, path, f"@{tmp_path}/endpoints.json")
    job("train", "pictures")
    steps = job.steps("pictures")
    assert [step["train/logprob_abs_diff_max"] <= 1e-5 and step["train/grad_norm"] > 0 for step in steps] == [True] * 2
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    pad, compared = model.config.image_token_id, 0
    for sample in read_dump(job.runs / "pictures" / "rollouts", 0).samples:
        places, files = places_of(sample.picture_places), list(map(picture_file, sample.multimodal_inputs["image"]))
        tokens = torch.tensor([*sample.prompt_ids, *sample.response_ids])
        at = [place.at < len(sample.prompt_ids) for place in places]
        assert at == [i < in_prompt for i in range(len(places))] and places[0].size == len(files[0])
        if sample.turns < turns or (tokens == pad).sum() > sum(place.tokens for place in places):
            continue  # it has written a placeholder, which transformers takes for a picture's
        with torch.no_grad():
            expected = hf_picture_logprobs(model, path, tokens, files, pad)[len(sample.prompt_ids) :]
        own = torch.tensor(sample.response_mask) > 0
        torch.testing.assert_close(torch.tensor(sample.response_logprobs)[own], expected[own], rtol=0, atol=1e-5)
        compared += int(own.sum())
    assert compared > 50


def of_environment(media, number):
    """A row for `Seeing`, whose prompt has two pictures and whose episode four."""
    for i, file in enumerate(FILES):
        (media / f"{i}.png").write_bytes(file)
    last = base64.b64encode(FILES[(number + 3) % 4]).decode()
    return chat("see ", {"type": "image"}, "or", {"type": "image"}) | {
        "images": [f"{number}.png", f"{(number + 1) % 4}.png"],
        "metadata": {"path": f"{(number + 2) % 4}.png", "base64": last},
    }
