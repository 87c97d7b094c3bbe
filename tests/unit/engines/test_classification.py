"""Reward models with a classification head: configuration, command lines, requests and replies, and what is refused
before any engine is asked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from rltool.config.serve import EngineLaunch, ServeConfig, ServedModel
from rltool.config.train import TrainConfig
from rltool.engines.dialects.classification import check_head
from rltool.engines.dialects.table import dialect
from rltool.engines.launch.plan import Host, Settings, engine_slots, plan_engines, seat_slots
from rltool.engines.launch.start import check_processes, order_of_file, order_of_flags
from rltool.engines.plugin import info
from rltool.errors import EngineError, UsageError
from rltool.rollout.data import PromptSet
from rltool.rollout.data.prompt import Prompt
from rltool.training.checks import asked_models
from rltool.training.checks.asked_models import check_reward_models, check_tasks, labels_of
from rltool.training.checks.side_models import check_all_there
from tests.tiny_models import write_tiny_reward_model

VLLM, SGLANG = dialect("vllm"), dialect("sglang")


def config(**more) -> TrainConfig:
    return TrainConfig(model={"path": "m"}, **more)


def launch(model: Path = Path("/models/reward"), **changes) -> EngineLaunch:
    fields = {
        "index": 0, "model": model, "host": "127.0.0.1", "port": 8101, "gpus": (0,), "tp": 1, "device": "cuda",
        "served_name": "reward", "dtype": None, "max_model_len": None, "seed": 3, "trust_remote_code": False,
        "python": Path("/venv/bin/python"), "key_file": Path("/run/key"), "boot_id": "b" * 32,
        "weight_backend": "rltool", "work_dir": Path("/run"), "task": "classify", "update_weights": False,
    }  # fmt: skip
    return EngineLaunch(**fields | changes)


# -- configuration


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServedModel(task="classify", update_weights=True), "no trainer syncs such a model"),
        (lambda: ServedModel(task="classify", start_router=True), "asked directly; leave start_router out"),
        (lambda: ServeConfig(model="m", task="classify"), "--task classify goes with --no-update-weights"),
        (
            lambda: config(
                models={"reward": {"path": "r", "task": "classify"}},
                engines={"groups": [{"model": "reward", "role": "prefill"}]},
            ),
            'role = "prefill", and a classifier has regular engines alone',
        ),
    ],
)
def test_a_classifier_is_neither_synced_nor_routed_nor_halved(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


def test_the_task_of_a_model_reaches_its_engines_alone():
    made = config(
        models={"reward": {"path": "r", "task": "classify"}},
        engines={"mode": "managed", "groups": [{}, {"name": "r", "model": "reward"}]},
    )
    slots = engine_slots(made.engines.groups)
    settings = Settings(order_of_file(made).models, Path("/k"), Path("/s"))
    found = plan_engines(slots, seat_slots(slots, [Host("h", gpus=(0, 1))]), settings, lambda node, address: 1)
    assert [one.task for one in found.launches] == ["generate", "classify"]
    served = ServeConfig(model="m", served_name="reward", task="classify", update_weights=False)
    assert order_of_flags(served).models["reward"].task == "classify"


# -- command lines


@pytest.mark.parametrize(
    ("architecture", "convert"),
    [("Qwen2ForSequenceClassification", []), ("Qwen2ForCausalLM", ["--convert", "classify"])],
)
def test_vllm_is_started_for_pooling_and_told_to_convert_what_would_become_an_embedder(tmp_path, architecture, convert):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    argv = VLLM.argv(launch(tmp_path))
    at = argv.index("--runner")
    assert argv[at : at + 2 + len(convert)] == ["--runner", "pooling", *convert]
    assert ("--convert" in argv) is bool(convert) and "--middleware" in argv
    assert not {"--enable-scale-out", "--weight-transfer-config", "--logprobs-mode"} & set(argv)


def test_a_model_without_a_readable_configuration_is_left_to_vllm():
    assert "--convert" not in VLLM.argv(launch(Path("/absent")))


def test_sglang_is_started_for_embedding():
    assert "--is-embedding" in SGLANG.argv(launch())
    assert "--is-embedding" not in SGLANG.argv(launch(task="generate"))


def test_a_head_that_sglang_would_add_random_numbers_to_is_refused(tmp_path):
    bare = launch(write_tiny_reward_model(tmp_path / "bare"), engine="sglang")
    with pytest.raises(UsageError, match="where the checkpoint has none.*--engine vllm, or add score.bias"):
        check_head(bare)
    check_head(launch(write_tiny_reward_model(tmp_path / "biased", head_bias=True), engine="sglang"))
    for changes in ({"engine": "vllm"}, {"task": "generate"}):
        check_head(bare.model_copy(update=changes))


def test_serve_engines_refuses_it_before_anything_starts(tmp_path):
    with pytest.raises(UsageError, match="SGLang gives the head of a Qwen2ForSequenceClassification a bias"):
        check_processes([launch(write_tiny_reward_model(tmp_path), engine="sglang")])


# -- requests and replies


def test_requests_and_replies():
    http = VLLM.classify((5, 6), use_activation=True)
    assert (http.path, http.body) == ("/classify", {"input": [5, 6], "use_activation": True})
    assert VLLM.parse_classify({"data": [{"probs": [0.5, -3]}]}) == (0.5, -3.0)
    assert SGLANG.classify((5, 6), use_activation=False).body == {"input_ids": [5, 6]}
    assert SGLANG.parse_classify({"embedding": [1.5]}) == (1.5,)


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")], [None], None])
def test_a_score_that_is_no_number_is_the_engines_failure(values):
    for engine_dialect, reply in ((VLLM, {"data": [{"probs": values}]}), (SGLANG, {"embedding": values})):
        with pytest.raises(EngineError, match="expected one finite number for each label"):
            engine_dialect.parse_classify(reply)


@pytest.mark.parametrize(
    ("runner", "classification", "task"),
    [("generate", None, "generate"), ("pooling", object(), "classify"), ("pooling", None, "pooling")],
)
def test_the_plugin_tells_what_the_server_is_for(runner, classification, task):
    state = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(runner_type=runner)),
        serving_classification=classification,
    )
    assert info._task(state) == task
    facts = {"task": task, "model_path": "m", "weight_version": "v", "model_config": {}}
    assert info.sglang_model_info(facts)["is_generation"] is (task == "generate")


# -- what asks which model


CLASSIFIER = {"reward": {"path": "r", "task": "classify"}}
GENERATOR = {"reward": {"path": "r"}}
OPTIONS = {"model": "reward"}


@pytest.mark.parametrize(
    ("models", "more", "setting"),
    [
        (CLASSIFIER, {"reward": {"function": "judge", "options": OPTIONS}}, "reward.function = 'judge'"),
        (CLASSIFIER, {"reward": {"function": "judge-probability", "options": OPTIONS}}, "'judge-probability'"),
        (CLASSIFIER, {"reward": {"group": "pairwise-judge", "group_options": OPTIONS}}, "reward.group = 'pairwise"),
        (
            CLASSIFIER,
            {"model": {"path": "m", "teacher": "reward"}, "algorithm": {"distill_coef": 0.1}},
            "model.teacher = 'reward'",
        ),
        (GENERATOR, {"reward": {"function": "reward-model"}}, "reward.function = 'reward-model'"),
        (
            GENERATOR,
            {"reward": {"parts": [{"name": "exact"}, {"name": "rm", "function": "reward-model"}]}},
            r"reward.parts \(rm\) = 'reward-model'",
        ),
        (
            GENERATOR,
            {"eval": {"sets": {"a": "a.jsonl"}, "overrides": {"a": {"reward": "reward-model"}}}},
            "eval.overrides.a.reward = 'reward-model'",
        ),
    ],
)
def test_whatever_asks_a_model_for_what_it_is_not_is_named(models, more, setting):
    made = TrainConfig(**{"model": {"path": "m"}, "models": models} | more)
    tasks = {name: model.task for name, model in made.models.items()}
    with pytest.raises(UsageError, match=f"{setting}.*models.reward.task"):
        check_tasks(made, tasks)
    check_tasks(made, {})  # of a model that nobody knows yet nothing is said
    check_tasks(made, {"reward": "classify" if tasks["reward"] == "generate" else "generate"})


def test_a_model_that_the_run_does_not_have_is_named_before_anything_is_asked():
    made = config(reward={"function": "reward-model", "options": {"model": "rm"}})
    with pytest.raises(UsageError, match=r"asks model 'rm', which the run does not have \(it has: judge\).*models\.rm"):
        check_all_there(made, ["judge"])
    check_all_there(made, ["rm"])


@pytest.fixture
def reward_dir(tmp_path, monkeypatch):
    """A model's directory whose tokenizer has a template, for config.json of the test's own."""
    monkeypatch.setattr(asked_models, "load_tokenizer", lambda path: SimpleNamespace(has_template=True))

    def write(**hf) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(hf))
        return tmp_path

    return write


def asks(path: Path | None, **options) -> TrainConfig:
    return config(
        models={"reward": {"path": path, "task": "classify", "external": ["h:1"]}},
        reward={"function": "reward-model", "options": options},
    )


def test_a_model_with_one_label_needs_no_choice_and_one_with_several_does(reward_dir):
    one = reward_dir(id2label={"0": "LABEL_0"})
    check_reward_models(asks(one), [])
    three = reward_dir(id2label={"2": "good", "0": "bad", "1": "so-so"})
    with pytest.raises(UsageError, match=r"3 labels \(0 bad, 1 so-so, 2 good\); name the reward's.*label = NUMBER"):
        check_reward_models(asks(three), [])
    check_reward_models(asks(three, label=2), [])
    for label in (3, -1, "good"):
        with pytest.raises(UsageError, match="is none of the labels"):
            check_reward_models(asks(three, label=label), [])


def test_labels_are_those_that_transformers_reads():
    assert labels_of({}) == ["LABEL_0", "LABEL_1"]
    assert labels_of({"num_labels": 1}) == ["LABEL_0"]


def test_the_reward_model_needs_a_directory_and_a_template(reward_dir, monkeypatch):
    with pytest.raises(UsageError, match=r"name its directory in models\.reward\.path"):
        check_reward_models(asks(None), [])
    monkeypatch.setattr(asked_models, "load_tokenizer", lambda path: SimpleNamespace(has_template=False))
    with pytest.raises(UsageError, match="has no chat template"):
        check_reward_models(asks(reward_dir(id2label={"0": "LABEL_0"})), [])


def test_prompts_in_the_policys_template_are_refused_unless_the_rows_own_are_named(reward_dir):
    path = reward_dir(id2label={"0": "LABEL_0"})
    chat = PromptSet([Prompt(0, (1,), "<user>a", messages=({"role": "user", "content": "a"},))], 0)
    plain = PromptSet([Prompt(0, (1,), "a")], 0)
    check_reward_models(asks(path), [plain, PromptSet([], 0)])
    check_reward_models(asks(path, prompt_key="messages"), [plain, chat])
    applied = asks(path).model_copy(update={"data": config(data={"apply_chat_template": True}).data})
    for made, sets in ((asks(path), [plain, chat]), (applied, [plain])):
        with pytest.raises(UsageError, match=r"policy's chat template.*data\.metadata_keys.*prompt_key"):
            check_reward_models(made, sets)
