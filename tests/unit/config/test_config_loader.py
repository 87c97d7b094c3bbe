import math
from pathlib import Path
from typing import get_args

import pytest

from rltool.config.algorithm import AlgorithmConfig
from rltool.config.loader import ConfigError, load_config
from rltool.config.methods import CISPO, PPO, OwnObjective
from rltool.config.rules import RULES_OF_GENERATION
from rltool.config.serve import ServeConfig
from rltool.config.train import TrainConfig


def write(tmp_path: Path, text: str, name: str = "run.toml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def test_flags_win_over_set_over_later_files_over_earlier_ones_over_defaults(tmp_path):
    first = write(
        tmp_path, 'seed = 1\nsteps = 5\n[model]\npath = "a"\n[optimizer]\nlr = 1.0\nmin_lr = 0.5\n', "first.toml"
    )
    second = write(tmp_path, "steps = 6\n[optimizer]\nlr = 2.0\n", "second.toml")
    loaded = load_config(
        TrainConfig,
        [first, second],
        ["optimizer.lr=3.0", "model.path=models/b"],
        {"seed": ("--seed", 9), "steps": ("--steps", None)},
    )
    config = loaded.config
    assert (config.seed, config.steps, config.optimizer.lr, config.optimizer.min_lr) == (9, 6, 3.0, 0.5)
    assert config.model.path == Path("models/b")
    assert config.optimizer.beta1 == 0.9
    assert loaded.origins == {
        "seed": "--seed", "steps": str(second), "optimizer.lr": "--set", "optimizer.min_lr": str(first),
        "model.path": "--set",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("[optimiser]\nlr = 1.0", "did you mean optimizer"),
        ("[optimizer]\nzzz = 1.0\n", "known here"),
        ("[optimizer]\nwarmup_step = 1", "did you mean optimizer.warmup_steps"),
        ("[trainer]\nlr = 1.0", "did you mean optimizer.lr"),
        ("lr = 1.0", "did you mean optimizer.lr"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_known_one_named(tmp_path, text, suggestion):
    with pytest.raises(ConfigError, match=suggestion) as error:
        load_config(TrainConfig, [write(tmp_path, text)])
    assert "run.toml" in str(error.value) and error.value.exit_code == 2


def test_an_unknown_key_in_set_is_refused():
    with pytest.raises(ConfigError, match="rollout.prompts_per_step"):
        load_config(TrainConfig, [], ["rollout.prompt_per_step=3"])


@pytest.mark.parametrize("text", ["optimizer.lr", "=3", ""])
def test_a_malformed_set_shows_the_form(text):
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(TrainConfig, [], [text])


def test_a_wrong_value_names_key_value_and_origin(tmp_path):
    file = write(tmp_path, '[model]\npath = "a"\n[optimizer]\nlr = -1.0\n')
    with pytest.raises(ConfigError, match=r"optimizer\.lr: .*greater than 0 \(got -1.0\), from .*run\.toml"):
        load_config(TrainConfig, [file])


def test_a_missing_value_and_a_missing_or_broken_file_are_named(tmp_path):
    fix = r"--config FILE, which `rltool init` writes\) or with --set model\.path=\.\.\.$"
    with pytest.raises(ConfigError, match=rf"^model\.path is required; .*{fix}"):
        load_config(TrainConfig)
    with pytest.raises(ConfigError, match="no such file"):
        load_config(TrainConfig, [tmp_path / "none.toml"])
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(TrainConfig, [write(tmp_path, "a = ")])


def test_tables_of_the_users_own_names_merge(tmp_path):
    file = write(tmp_path, '[model]\npath = "a"\n[eval.sets]\nmath = "m.jsonl"\n')
    config = load_config(TrainConfig, [file], ["eval.sets.code=c.jsonl"]).config
    assert config.eval.sets == {"math": "m.jsonl", "code": "c.jsonl"}


def test_sections_of_the_users_own_names_are_set_key_by_key(tmp_path):
    file = write(tmp_path, '[model]\npath = "m"\n[models.judge]\npath = "j"\n')
    config = load_config(TrainConfig, [file], ["models.judge.start_router=true", "models.ref.path=r"]).config
    assert config.models["judge"].path == Path("j") and config.models["judge"].start_router
    assert config.models["ref"].path == Path("r")
    with pytest.raises(ConfigError, match=r"unknown key 'models\.judge\.pth'; did you mean models\.judge\.path"):
        load_config(TrainConfig, [file], ["models.judge.pth=x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[engines.groups]]\nconut = 2", r"unknown key 'engines\.groups\.0\.conut', from .*; did you mean count"),
        ('[models.judge]\npaht = "x"', r"unknown key 'models\.judge\.paht', from .*; did you mean path"),
        ("[[engines.groups]]\n[[engines.groups]]", "several groups are called default"),
        ('[[engines.groups]]\nmodel = "judge"', "group 'default' serves model 'judge', which is none of: policy"),
        ('[[engines.groups]]\nmodel = "judge"\n[models.judge]', "models.judge.path: group 'default' has to serve it"),
        ('[models.policy]\npath = "x"', r"\[models\.policy\]: the policy is model.path"),
        ('[[engines.groups]]\nrole = "placeholder"\nflags = ["-x"]', "a placeholder starts no process"),
    ],
)
def test_groups_and_models_that_make_no_sense_are_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, [write(tmp_path, f'[model]\npath = "m"\n{text}\n')])


def test_world_size_that_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="world_size 3 is not a multiple of tensor_parallel 2"):
        load_config(TrainConfig, [], ["model.path=a", "trainer.world_size=3", "trainer.tensor_parallel=2"])


def test_a_key_of_an_earlier_release_is_refused_with_the_name_that_it_has_now(tmp_path):
    (tmp_path / "old.toml").write_text('[model]\npath = "m"\n[rollout]\ntemperature = 0.7\n')
    with pytest.raises(ConfigError, match=r"old.toml: rollout.temperature is sampling.temperature now"):
        load_config(TrainConfig, [tmp_path / "old.toml"])


def test_a_key_that_nothing_took_the_place_of_is_refused_with_the_reason(tmp_path):
    (tmp_path / "old.toml").write_text('[model]\npath = "m"\n[trainer]\nvirtual_pipeline_parallel = 1\n')
    with pytest.raises(ConfigError, match=r"old.toml: trainer.virtual_pipeline_parallel is gone: .*; leave it out"):
        load_config(TrainConfig, [tmp_path / "old.toml"])


def test_every_renamed_key_leads_to_one_that_exists_and_is_gone_itself():
    gone = {**TrainConfig.renamed, **dict.fromkeys(TrainConfig.removed, "model.path")}
    for old, new in gone.items():
        for key, there in ((old, False), (new, True)):
            *sections, name = key.split(".")
            models = [TrainConfig]
            for section in sections:
                field = models[0].model_fields[section].annotation
                models = [field] if isinstance(field, type) else list(get_args(field))
            assert any(name in model.model_fields for model in models) is there, key


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["modle.path=x"], "--set: unknown key 'modle.path'; did you mean model.path?"),
        (["modle.pth=x"], "--set: unknown key 'modle.pth'; did you mean model.path?"),
        (["modle.zzz=x"], "--set: unknown key 'modle.zzz'; did you mean model?"),
        (["evl.sets.math=x"], "--set: unknown key 'evl.sets.math'; did you mean eval.sets.math?"),
        (
            ["data.train=task/train.jsonl"],
            "data.train: expected a list, [VALUE, ...] (got 'task/train.jsonl'), from --set; give a list: "
            """--set 'data.train=["task/train.jsonl"]'""",
        ),
        (
            ["rollout=3"],
            "rollout: expected a table of settings, {KEY = VALUE, ...} (got 3), from --set; set one of its keys, such "
            "as rollout.prompts_per_step",
        ),
        (["eval.sets=3"], "eval.sets: expected a table, {NAME = VALUE, ...} (got 3), from --set"),
        (
            ["engines.groups=[3]"],
            "engines.groups.0: expected a table of settings, {KEY = VALUE, ...} (got 3), from --set",
        ),
        (
            ["algorithm.loss=polcy"],
            "algorithm.loss: Input should be 'policy' or 'sft' (got 'polcy'), from --set; 'polcy': did you mean "
            "'policy'?",
        ),
    ],
)
def test_a_wrong_word_is_answered_with_the_one_that_was_meant(sets, message):
    with pytest.raises(ConfigError) as error:
        load_config(TrainConfig, [], ["model.path=m", *sets])
    assert str(error.value) == message


def test_names_beside_an_import_path_are_one_line(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_config(TrainConfig, [], ["model.path=m", "rollout.group_filter=equal_reward"])
    said = str(error.value)
    assert said.startswith("rollout.group_filter: Input should be 'none' or ") and said.count("\n") == 0
    assert said.endswith(
        "; or an import path `package.module:function` (got 'equal_reward'), from --set; 'equal_reward': did you mean "
        "'equal_rewards'?"
    )
    assert "literal[" not in said and "constrained" not in said
    with pytest.raises(ConfigError, match=r"^data\.train: .*; give a list: \[\"a\"\]$"):
        load_config(TrainConfig, [write(tmp_path, '[model]\npath = "m"\n[data]\ntrain = "a"\n')])


def test_a_refusal_of_several_keys_together_has_no_empty_key():
    flags = {"model": ("MODEL", Path("m")), "task": ("--task", "classify")}
    with pytest.raises(ConfigError, match="^--task classify goes with"):
        load_config(ServeConfig, flags=flags)


def test_a_name_of_the_users_own_stays_in_the_key():
    with pytest.raises(ConfigError, match=r"^eval\.sets\.gsm-8k: .*\(got 3\), from --set$"):
        load_config(TrainConfig, [], ["model.path=m", "eval.sets.gsm-8k=3"])


def test_a_configuration_made_in_python_is_refused_by_the_rules_between_its_keys():
    with pytest.raises(ValueError, match=r"rollout.prompts_per_step 33 .* such as 32"):
        TrainConfig(model={"path": "m"}, rollout={"prompts_per_step": 33}, optimizer_steps_per_rollout=2)
    with pytest.raises(ValueError, match="algorithm.distill_top_k = 64 would have no effect"):
        TrainConfig(model={"path": "m"}, algorithm={"distill_top_k": 64})


def test_a_rule_between_keys_names_where_each_of_them_was_set(tmp_path):
    file = write(tmp_path, '[model]\npath = "m"\n[rollout]\npartial_rollout = true\noversampling_factor = 1.5\n')
    with pytest.raises(ConfigError) as error:
        load_config(TrainConfig, [file], ["rollout.max_staleness=0"], {"steps": ("--steps", 3)})
    assert str(error.value).endswith(f" (rollout.partial_rollout from {file}, rollout.max_staleness from --set)")
    with pytest.raises(ConfigError) as error:
        load_config(TrainConfig, [], ["model.path=m", "trainer.world_size=3", "trainer.tensor_parallel=2"])
    assert str(error.value).endswith(" (trainer.world_size from --set, trainer.tensor_parallel from --set)")


def test_a_verb_that_does_not_train_applies_the_rules_that_it_needs():
    sets = ["model.path=m", "trainer.max_tokens_per_micro_batch=8", 'rollout.environment_arguments={"a"=1}']
    assert load_config(TrainConfig, [], sets, rules=()).config.trainer.max_tokens_per_micro_batch == 8
    with pytest.raises(ConfigError, match=r"rollout\.environment_arguments"):
        load_config(TrainConfig, [], sets, rules=RULES_OF_GENERATION)


WITH_CISPO = '[model]\npath = "m"\n[algorithm.objective]\nclip_low = 1.0\nkind = "cispo"\n'


def test_tables_with_a_kind_merge_key_by_key_and_another_kind_begins_anew(tmp_path):
    def loaded(*sets: str):
        found = load_config(TrainConfig, [write(tmp_path, WITH_CISPO)], sets)
        return found.config.algorithm.objective, [key for key in found.origins if "objective" in key]

    keys = ["algorithm.objective.kind", "algorithm.objective.clip_low"]
    assert loaded("algorithm.objective.ratio=sequence") == (
        CISPO(clip_low=1.0, ratio="sequence"), [*keys, "algorithm.objective.ratio"]
    )  # fmt: skip
    assert loaded("algorithm.objective.kind=cispo") == (CISPO(clip_low=1.0), keys)
    assert loaded("algorithm.objective=ppo") == (PPO(), keys[:1])
    assert loaded("algorithm.objective.kind=ppo") == (PPO(), keys[:1])
    for both in (["algorithm.objective=a:b", "algorithm.objective.options.x=3"],
                 ['algorithm.objective={options={x=3}, kind="own", function="a:b"}']):  # fmt: skip
        assert loaded(*both)[0] == OwnObjective(function="a:b", options={"x": 3})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.objective=cipso", "algorithm.objective.kind: expected one of 'ppo', .*from --set; .*mean 'cispo'"),
        ("algorithm.objective.kind=[1]", "algorithm.objective.kind: expected one of"),
        ("algorithm.objective=3", "algorithm.objective.kind: expected one of"),
        ("algorithm.objective.clip_hgih=1", "did you mean algorithm.objective.clip_high"),
        ("algorithm.objective.clip_low.x=1", "algorithm.objective.clip_low: Input should be a valid number"),
        ("algorithm.objective.ratio=tokn", "algorithm.objective.ratio: .*from --set; 'tokn': did you mean 'token'"),
        ("algorithm.clip_high=0.3", "algorithm.clip_high is algorithm.objective.clip_high now"),
    ],
)
def test_what_is_wrong_in_a_table_with_a_kind_is_named(tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, [write(tmp_path, WITH_CISPO)], [setting])


def test_a_table_with_a_kind_comes_back_from_json():
    made = AlgorithmConfig(objective={"clip_high": math.inf})
    assert AlgorithmConfig.model_validate_json(made.model_dump_json()) == made
