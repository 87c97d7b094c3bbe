"""Every recipe passes the checks of `train` and has a plan, on the hardware that it names.

No network, no engine, no weights: hub names stand for directories with the published shape of their model.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from rltool.cli import load_command
from rltool.config.loader import Loaded, load_config
from rltool.config.train import TrainConfig
from rltool.engines.launch.plan import Host
from rltool.models import hub
from rltool.processes.run_directory import RunDirectory
from rltool.quickstart.compose import WARM_UP_STEPS, grpo_toml
from rltool.quickstart.task import TaskFiles
from rltool.terminal import Console
from rltool.training.checks.validate import check_config, check_model
from rltool.training.cluster.managed import expected_plan
from rltool.training.cluster.placement import plan_placement
from rltool.training.observe.report import print_plan
from rltool.training.prepare import Prepared

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(
    file.relative_to(ROOT).as_posix()
    for file in (ROOT / "recipes").rglob("*.toml")
    if file.parent.name not in ("hardware", "tool_use")
)
"""tool_use's are laid over each other by its run.py, and have a test of their own (tests/contract)."""
HARDWARE = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "recipes/hardware").glob("*.toml"))

QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 32768, "hidden_act": "silu"}  # fmt: skip
QWEN_05 = QWEN | dict(
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
QWEN_15 = QWEN | dict(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
QWEN_7 = QWEN | dict(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
TINY_VISION = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 66, "video_token_id": 67,
    "vision_config": {"patch_size": 8, "spatial_merge_size": 2, "deepstack_visual_indexes": [0, 1]},
    "text_config": dict(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=68, max_position_embeddings=256, rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[6, 5, 5], mrope_interleaved=True),
    ),
}  # fmt: skip
MODELS = {
    "Qwen/Qwen2.5-0.5B": QWEN_05,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN_05,
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN_15,
    "Qwen/Qwen2.5-7B": QWEN_7,
    "Qwen/Qwen2.5-7B-Instruct": QWEN_7,
    # Not of the hub: what a recipe before this one leaves.
    "runs/gsm8k-warm-start/hf/step_117": QWEN_05,
    "runs/spelling/warmup/hf/step_350": QWEN_05,
    "runs/pictures/model": TINY_VISION,
    "runs/shop/model": QWEN_05,
    "runs/shop-warm-start/hf/step_150": QWEN_05,
    "runs/pictures-warm-start/hf/step_16": TINY_VISION,
    "MODEL": QWEN_05,
    "WARM_START": QWEN_05,
}
ONE_GPU, ONE_HOST = [Host("h0", gpus=(0,))], [Host("h0", gpus=tuple(range(8)))]
TWO_HOSTS = [Host(f"h{n}", f"10.0.0.{n + 1}", tuple(range(8))) for n in range(2)]
RUNS = [
    ("recipes/quickstart/grpo.toml", None, []),
    ("recipes/arithmetic/warm_start.toml", None, ONE_GPU),
    ("recipes/arithmetic/grpo.toml", None, ONE_GPU),
    ("recipes/gym/grpo.toml", None, ONE_GPU),
    ("recipes/gym/grpo.toml", "one_host", ONE_HOST),
    ("recipes/gsm8k/warm_start.toml", None, ONE_GPU),
    ("recipes/gsm8k/warm_start.toml", "ranks", ONE_HOST),
    ("recipes/gsm8k/grpo.toml", None, ONE_GPU),
    ("recipes/gsm8k/grpo.toml", "one_host", ONE_HOST),
    ("recipes/gsm8k/grpo.toml", "two_hosts", TWO_HOSTS),
    ("recipes/gsm8k/ppo.toml", None, ONE_GPU),
    ("recipes/gsm8k/ppo.toml", "one_host", ONE_HOST),
    ("recipes/dapo_math/grpo.toml", None, ONE_HOST),
    ("recipes/dapo_math/grpo.toml", "two_hosts", TWO_HOSTS),
    ("recipes/judge/grpo.toml", None, ONE_HOST),
    ("recipes/distill/teacher.toml", None, ONE_HOST),
    ("recipes/shop/warm_start.toml", None, ONE_GPU),
    ("recipes/shop/grpo.toml", None, ONE_GPU),
    ("recipes/pictures/warm_start.toml", None, []),
    ("recipes/pictures/grpo.toml", None, []),
]


@pytest.fixture
def stubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory where every model and every file that a recipe makes beforehand is there."""
    monkeypatch.chdir(tmp_path)

    def directory(path: Path, *, setting: str = "model.path") -> Path:
        made = tmp_path / "models" / str(path).replace("/", "--")
        made.mkdir(parents=True, exist_ok=True)
        (made / "config.json").write_text(json.dumps(MODELS[str(path)]))
        return made

    monkeypatch.setattr(hub, "local_model", directory)
    files = "arithmetic/data/train", "arithmetic/data/held_out", "pictures/data/train", "pictures/data/held_out"
    shop = "shop/train", "shop/held_out", "shop/warm_start"
    for file in (*files, *shop, "spelling/task/train", "spelling/task/heldout"):
        made = tmp_path / "runs" / f"{file}.jsonl"
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch()
    return tmp_path


def loaded_recipe(recipe: str, hardware: str | None) -> Loaded[TrainConfig]:
    files = [ROOT / recipe, *([ROOT / f"recipes/hardware/{hardware}.toml"] if hardware else [])]
    loaded = load_config(TrainConfig, files, [])
    config = hub.with_local_models(loaded.config)
    if config.needs_engines and not config.engines.started_by_train:  # what --rollout-external names
        engines = config.engines.model_copy(update={"external": ("127.0.0.1:8000",)})
        config = config.model_copy(update={"engines": engines})
    return loaded._replace(config=config)


@pytest.mark.parametrize(("recipe", "hardware", "hosts"), RUNS, ids=[f"{recipe} {name}" for recipe, name, _ in RUNS])
def test_a_recipe_passes_the_checks_and_its_plan_fits_the_hardware(recipe, hardware, hosts, stubbed):
    loaded = loaded_recipe(recipe, hardware)
    config = loaded.config
    check_config(config)
    check_model(config)
    gpus = sum(len(host.gpus) for host in hosts)
    plan = plan_placement(config, gpu=gpus > 0, generates=config.needs_engines, gpus_per_host=8)
    assert plan.total("GPU") <= gpus, plan.describe()
    run = RunDirectory(stubbed / "runs" / "recipe")
    expected = None
    if config.needs_engines and config.engines.started_by_train:
        expected = expected_plan(config, plan, run, hosts or [Host("h0")])
    out = io.StringIO()
    prepared = Prepared(loaded, run, plan, plan.device, None, None, expected=expected)
    print_plan(prepared, Console(file=out, width=200))
    assert plan.describe() in out.getvalue()
    if expected is not None:
        assert len(expected.launches) == sum(group.count for group in config.engines.groups)
    # For their mismatch KL; everything else on a GPU is in 16 bits.
    exact = recipe in ("recipes/arithmetic/grpo.toml", "recipes/shop/grpo.toml")
    assert config.trainer.device == "cpu" or config.model.dtype == ("float32" if exact else "bfloat16")


def test_every_recipe_and_every_kind_of_hardware_is_tried():
    assert {recipe for recipe, _, _ in RUNS} == set(RECIPES)
    assert {f"recipes/hardware/{name}.toml" for _, name, _ in RUNS if name} == set(HARDWARE)


@pytest.mark.parametrize("file", [*RECIPES, *HARDWARE])
def test_the_head_of_a_recipe_has_a_command_that_parses_and_says_what_was_run(file):
    head = "\n".join(line.removeprefix("#").strip() for line in (ROOT / file).read_text().split("\n\n")[0].splitlines())
    head = head[: head.index("\nsteps")] if "\nsteps" in head else head
    commands = re.findall(r"^rltool train .*", head.replace("\\\n", " "), re.MULTILINE)
    assert any(file in command for command in commands), head
    for command in commands:
        words = shlex.split(command)[2:]
        train = load_command("train")
        train.make_context("train", words)
        assert all((ROOT / word).is_file() for word in words if word.startswith("recipes/"))
    said = re.findall(r"^(Hardware|Time|Run): \S", head, re.MULTILINE)
    assert said == ["Hardware", "Time", "Run"][file in HARDWARE :], "a fragment is named for its hardware"


def test_the_table_of_recipes_is_complete():
    table = (ROOT / "recipes/README.md").read_text()
    assert set(re.findall(r"\((\S+\.toml)\)", table)) == {name.removeprefix("recipes/") for name in RECIPES + HARDWARE}


def test_the_quickstarts_recipe_trains_as_the_quickstart_does():
    task = TaskFiles(*(Path(f"runs/spelling/task/{name}.jsonl") for name in ("train", "heldout", "warm_start")))
    model = Path(f"runs/spelling/warmup/hf/step_{WARM_UP_STEPS}")
    theirs = tomllib.loads(grpo_toml(model, task, 0, 100))
    ours = tomllib.loads((ROOT / "recipes/quickstart/grpo.toml").read_text())
    for section in ("model", "optimizer", "rollout", "data", "monitor", "checkpoint"):
        assert ours[section] == theirs[section], section
    assert ours["eval"]["sets"] == theirs["eval"]["sets"]
