"""Agents that send pictures, by the real clients: what engines get, what is recorded, and what is refused."""

from __future__ import annotations

import base64
import io

import anthropic
import openai
import pytest
import requests
from PIL import Image

from rltool.config.gateway import GatewayConfig
from rltool.gateway.launch import plan_gateway, start_gateway
from rltool.gateway.store import SessionStore
from rltool.models.pictures import Pictures, places_of, spread
from rltool.models.registry import family_for, read_hf_config
from rltool.processes.keys import read_key
from rltool.processes.run_directory import open_run
from rltool.processes.supervise import ProcessGroup
from rltool.quickstart.tiny_model import make_tiny_vision_model
from rltool.rollout.pictures import PictureReader
from tests.contract.fakes.scripted import ScriptedVllm
from tests.contract.gateway.running import Gateway
from tests.gateway_models import PAD, Words, seeing_tokenizer, write_seeing_model

TOKENIZER = seeing_tokenizer()
WORDS = Words(TOKENIZER)
PICTURES = Pictures(token=TOKENIZER.convert_tokens_to_ids(PAD), patch=8, merge=2, deep=0)


class Seeing(ScriptedVllm):
    """Expands pictures, as a vLLM does that has the model's image processor."""

    reader: PictureReader

    def _of_prompt(self, body):
        if not body.get("return_token_ids"):
            return {}
        sizes = [self.reader.size(file_of(part["url"])) for part in body["content_parts"]]
        return {"prompt_token_ids": spread(body["token_ids"], self.reader.pictures.token, sizes)[0]}

    def parts(self):
        sent = [r.body.get("content_parts", ()) for r in self.requests if r.path == "/rltool/generate"]
        return [[part["url"] for part in parts] for parts in sent]


def file_of(url):
    return base64.b64decode(url.partition(",")[2])


def picture(color, size=(40, 20), kind="png", **options):
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, kind, **options)
    return f"data:image/{kind};base64," + base64.b64encode(stream.getvalue()).decode()


RED, BLUE = picture("red"), picture("blue", (70, 70))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def engine(model):
    with Seeing(vocab_size=WORDS.size, default=WORDS.spell("fine")) as server:
        server.reader = PictureReader(PICTURES, model)
        yield server


@pytest.fixture
def gateway(engine, model, tmp_path):
    with Gateway(tmp_path, model, [engine], parts={"pictures": PICTURES}) as running:
        yield running


def user(*parts):
    content = [
        {"type": "image_url", "image_url": {"url": part}} if ":" in part else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def ask(gateway, session, *messages, stream=False):
    url = f"{gateway.url}/sessions/{session['id']}/v1"
    with openai.OpenAI(base_url=url, api_key=session["key"], max_retries=0) as client:
        found = client.chat.completions.create(model="policy", messages=messages, stream=stream)
        if stream:
            return {"role": "assistant", "content": "".join(c.choices[0].delta.content or "" for c in found)}
        return {"role": "assistant", "content": found.choices[0].message.content}


def test_pictures_are_recorded_in_their_places_and_kept_once_over_turns_processes_and_restarts(
    engine, model, gateway, tmp_path
):
    session = gateway.open()
    talk = [user("what is ", RED, "?")]
    talk += [ask(gateway, session, *talk), user(BLUE, "and ", RED)]
    with Gateway(tmp_path, model, [engine], parts={"pictures": PICTURES}) as other:
        talk += [ask(other, session, *talk, stream=True), {"role": "tool", "tool_call_id": "x", "content": "none"}]
        assert talk[-2]["content"] == "fine"
    gateway.kill()
    with Gateway(tmp_path, model, [engine], parts={"pictures": PICTURES}) as again:
        ask(again, session, *talk)
        record = again.record(session)
    assert engine.parts() == [[RED], [RED, BLUE, RED], [RED, BLUE, RED]]
    [trajectory] = record["trajectories"]
    ids, mask, places = trajectory["token_ids"], trajectory["loss_mask"], places_of(trajectory["picture_places"])
    assert [record["pictures"][digest] for digest in trajectory["pictures"]] == [RED, BLUE, RED]
    assert [(place.rows, place.columns, place.size) for place in places] == [
        (1, 2, len(file_of(RED))), (4, 4, len(file_of(BLUE))), (1, 2, len(file_of(RED)))
    ]  # fmt: skip
    marked = [at for at, token in enumerate(ids) if token == PICTURES.token]
    assert marked == [at for place in places for at in range(place.at, place.at + place.tokens)]
    assert not any(mask[at] for at in marked) and sum(mask) == 3 * len(WORDS.spell("fine"))
    sizes = [place[1:] for place in places]
    for unexpanded, seen in zip(engine.asked(), (1, 3, 3), strict=True):
        prompt = spread(unexpanded, PICTURES.token, sizes[:seen])[0]
        assert (ids[: len(prompt)], mask[len(prompt)]) == (prompt, 1)
    kept = sorted((tmp_path / "sessions").glob("*.pictures/*"))
    assert len(kept) == 2 and not any(RED[30:60] in file.read_text() for file in tmp_path.glob("sessions/*.jsonl"))


def test_a_turn_with_pictures_is_streamed_as_it_is_made(engine, gateway):
    session = gateway.open()
    engine.default, engine.seconds = WORDS.spell("a red one"), 1e6  # no token after the first
    url = f"{gateway.url}/sessions/{session['id']}/v1"
    with openai.OpenAI(base_url=url, api_key=session["key"], max_retries=0) as client:
        stream = client.chat.completions.create(model="policy", messages=[user("see ", RED)], stream=True)
        said = gateway.as_made(stream, session, engine)
    [trajectory] = gateway.record(session)["trajectories"]
    assert (said, sum(trajectory["loss_mask"])) == ("a red one", len(engine.default))
    assert trajectory["token_ids"].count(PICTURES.token) == 2


@pytest.mark.parametrize("expands", [lambda ids: [*ids, PICTURES.token], lambda ids: None])
def test_of_pictures_that_the_engine_expands_otherwise_nothing_is_shown_or_recorded(engine, gateway, expands):
    plain = engine._of_prompt
    engine._of_prompt = lambda body: {"prompt_token_ids": expands(plain(body)["prompt_token_ids"])}
    session = gateway.open()
    for stream in False, True:
        with pytest.raises(openai.InternalServerError, match="the engine (expanded a prompt|does not say)"):
            ask(gateway, session, user("see ", RED), stream=stream)
    assert gateway.record(session)["turns"] == []


def test_the_same_words_with_another_picture_are_another_trajectory(engine, gateway):
    session = gateway.open()
    first = ask(gateway, session, user("see ", RED))
    blue = picture("blue")  # as many tokens
    ask(gateway, session, user("see ", blue), first, user("go on"))
    ask(gateway, session, user("see ", RED), first, user("go on"))
    one, other = gateway.record(session)["trajectories"]
    assert (other["parent"], other["shared"]) == (0, one["picture_places"][0]) and one["pictures"] != other["pictures"]
    assert len(one["finish_reasons"]) == 2 and engine.parts() == [[RED], [blue], [RED]]


def test_what_engine_and_trainer_would_read_differently_is_made_plain_once(engine, gateway):
    session = gateway.open()
    url = picture("green", kind="webp", lossless=True)
    ask(gateway, session, user(url))
    [[sent]] = engine.parts()
    assert sent.startswith("data:image/png") and Image.open(io.BytesIO(file_of(sent))).getpixel((0, 0)) == (0, 128, 0)
    record = gateway.record(session)
    assert list(record["pictures"].values()) == [sent]
    assert record["trajectories"][0]["picture_places"][3] == len(file_of(sent))


def test_claude_sends_pictures_too_and_has_their_tokens_counted(engine, gateway):
    session = gateway.open()
    source = {"type": "base64", "media_type": "image/png", "data": BLUE.partition(",")[2]}
    said = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "see"}]}]
    with anthropic.Anthropic(base_url=session["anthropic_base_url"], api_key=session["key"], max_retries=0) as client:
        counted = client.messages.count_tokens(model="policy", messages=said).input_tokens
        reply = client.messages.create(model="policy", max_tokens=9, messages=said)
    assert reply.usage.input_tokens == counted > 16 and engine.parts() == [[BLUE]]


def test_pictures_beyond_the_limits_and_what_is_none_are_refused_with_the_limit_s_name(engine, model, tmp_path):
    limits = {"max_picture_bytes": 2000, "max_picture_pixels": 100 * 100, "max_session_pictures": 2}
    noise = "data:image/png;base64," + base64.b64encode(bytes(3000)).decode()
    animated = io.BytesIO()
    Image.new("RGB", (8, 8)).save(animated, "tiff")
    tiff = "data:image/tiff;base64," + base64.b64encode(animated.getvalue()).decode()
    cut = "data:image/png;base64," + base64.b64encode(file_of(BLUE)[:60]).decode()
    wrong = {
        noise: "--max-picture-bytes",
        picture("red", (101, 100)): "--max-picture-pixels",
        picture("red", (800, 2)): "200 times",
        tiff: "it is no PNG, JPEG",
        cut: "cannot be read",
        "data:image/png;base64,????": "",
        "data:image/svg+xml,<svg/>": "base64",
    }
    with Gateway(tmp_path, model, [engine], limits, parts={"pictures": PICTURES}) as gateway:
        session = gateway.open()
        for url, said in wrong.items():
            with pytest.raises(openai.BadRequestError, match=rf"messages\[1\], picture 0: .*{said}") as refused:
                ask(gateway, session, user("x"), user(url))
            assert refused.value.code == "invalid_image"
        ask(gateway, session, user(RED, BLUE))
        ask(gateway, session, user(RED, RED, BLUE))
        with pytest.raises(openai.BadRequestError, match="--max-session-pictures"):
            ask(gateway, session, user(picture("green")))
        ask(gateway, gateway.open(), user(picture("green")))
    assert engine.parts() == [[RED, BLUE], [RED, RED, BLUE], [picture("green")]]


def test_a_conversation_in_which_the_model_has_written_a_placeholder_gets_no_further_picture(engine, gateway):
    session = gateway.open()
    engine.script.append([*WORDS.spell("so ", stop=False), PICTURES.token, WORDS.stop])
    first = ask(gateway, session, user("x"))
    assert PAD in first["content"]
    ask(gateway, session, user("x"), first, user("go on"))
    with pytest.raises(openai.BadRequestError) as refused:
        ask(gateway, session, user("x"), first, user(RED))
    assert refused.value.code == "sampled_placeholder"


@pytest.mark.parametrize(
    ("parts", "dialect", "said"),
    [
        ({}, "vllm", "images are not served: the model takes text alone"),
        ({"pictures": "trainer.context_parallel = 2 is"}, "vllm", "images are not served: trainer.context_parallel"),
        ({"pictures": PICTURES, "through_router": True}, "sglang", "images are not served: .*: a router takes text"),
    ],
)
def test_models_runs_and_engines_that_take_text_alone_say_so(engine, model, tmp_path, parts, dialect, said):
    with Gateway(tmp_path, model, [engine], parts=parts, dialect=dialect) as gateway:
        session = gateway.open()
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            ask(gateway, session, user("x", RED))
        assert refused.value.code == "unsupported_content" and gateway.record(session)["turns"] == []


def test_a_gateway_that_is_started_by_hand_reads_them_as_its_model_s_directory_says(tmp_path, monkeypatch):
    """In its own process, which has no torch."""
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    directory = make_tiny_vision_model(tmp_path / "model", seed=0)
    pictures = family_for(read_hf_config(directory)).pictures
    run = open_run("agents", create=True)
    with Seeing(vocab_size=10_000, default=[9, 8, 1]) as engine, ProcessGroup(run) as group:
        engine.reader = PictureReader(pictures, directory)
        url, parts = start_gateway(GatewayConfig(model=directory), plan_gateway([engine.url], None, "agents"), group)
        opened = requests.post(
            f"{url}/sessions", json={}, headers={"Authorization": f"Bearer {read_key(parts.key_file, url)}"}, timeout=60
        ).json()
        with openai.OpenAI(base_url=opened["openai_base_url"], api_key=opened["key"], max_retries=0) as client:
            client.chat.completions.create(model=opened["model"], messages=[user("x", BLUE)])
        assert engine.parts() == [[BLUE]] and engine.asked()[0].count(pictures.token) == 1


def test_pictures_go_with_the_file_of_their_session(gateway, tmp_path):
    session = gateway.open()
    ask(gateway, session, user(RED))
    ended = gateway.http("DELETE", f"/sessions/{session['id']}").json()
    assert list(ended["pictures"].values()) == [RED]
    assert SessionStore(tmp_path / "sessions").remove_ended(before=1e12) == 1
    assert list((tmp_path / "sessions").iterdir()) == []
