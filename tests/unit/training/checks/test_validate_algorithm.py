import pytest

from rltool.config.algorithm import AlgorithmConfig
from rltool.config.algorithm_rules import EFFECTIVE
from rltool.config.loader import ConfigError, load_config
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.training.checks.validate import check_own_functions, check_teachers_engines

PARTS = 'reward.parts=[{name="a", function="exact"}, {name="b", function="numeric"}]'

SERVED = ["algorithm.distill_kl_coef=0.1", "model.teacher=big", "models.big.path=big"]


def check(*sets: str) -> None:
    config = load_config(TrainConfig, [], ["model.path=model", *sets]).config
    check_own_functions(config.algorithm)
    check_teachers_engines(config)


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["algorithm.kl={kind='reward', coef=0.1, estimator='k1'}"],
        ["algorithm.kl={kind='loss', coef=0.1, estimator='k1', unbiased=true}"],
        ['algorithm.advantage="distill"', "model.teacher_path=teacher", "rollout.samples_per_prompt=1"],
        ['algorithm.advantage="reinforce_pp"', "rollout.samples_per_prompt=1", "algorithm.advantage.gamma=0.9"],
        [
            'algorithm.advantage="tests.unit.algorithms.own_algorithms:centred"',
            "algorithm.advantage.options.gamma=0.9",
            "model.teacher_path=teacher",
        ],
        [
            'algorithm.objective="tests.unit.algorithms.own_algorithms:reinforce"',
            "algorithm.objective.options.pull=0.1",
        ],
        [
            'algorithm.advantage="gae"',
            "rollout.samples_per_prompt=1",
            "algorithm.advantage.gae_lambda=1.0",
            "critic.lr=1e-4",
            "critic.warmup_rollouts=2",
            "steps=3",
        ],
        ['algorithm.loss="sft"', 'algorithm.loss_reduction="constant"', "algorithm.loss_length=7"],
        ["rollout.max_staleness=2", "algorithm.mask_tokens_older_than=1", 'algorithm.old_logprobs="rollout"'],
        ["rollout.partial_rollout=true", "rollout.oversampling_factor=1.5", "algorithm.mask_tokens_older_than=0"],
        ['algorithm.old_logprobs="rollout"', "algorithm.kl={kind='reward', coef=0.1}"],
        [
            "algorithm.is_weights=token",
            "algorithm.is_weights.cap=inf",
            "algorithm.is_weights.normalize=true",
            "algorithm.is_weights.floor=0.1",
        ],
        ["algorithm.distill_coef=0.1", "model.teacher_path=teacher", "algorithm.reward_clip=[-1, 1.5]"],
        [
            "algorithm.objective=sapo",
            "algorithm.objective.temperature_neg=1.1",
            "algorithm.off_policy_mask_threshold=0.5",
        ],
        [
            "algorithm.objective.clip_high=inf",
            "algorithm.objective.clip_low=1.0",
            "algorithm.entropy={kind='kl_cov', fraction=1e-3}",
            "epochs_per_rollout=2",
        ],
        ["algorithm.entropy={kind='kl_cov', fraction=1e-3}", "algorithm.old_logprobs=rollout"],
        [
            "algorithm.advantage.credit=turn",
            "algorithm.advantage.turn_gamma=0.4",
            "rollout.environment=tests.unit.environments.own_environments:Counting",
        ],
        ["algorithm.kl={kind='loss', coef=0.1, target=0.05}", "algorithm.entropy={kind='bonus', target=0.2}"],
        ["algorithm.advantage=gdpo", PARTS, "algorithm.kl={kind='loss', coef=0.1}"],
        ["algorithm.advantage=distill", "model.teacher=big", "models.big.path=big"],
        [
            "algorithm.advantage=none",
            "algorithm.distill_kl_coef=1.0",
            "model.teacher_path=t",
            "rollout.samples_per_prompt=1",
            "algorithm.kl={kind='loss', coef=0.1}",
            "algorithm.entropy={kind='bonus', coef=0.1}",
        ],
        ["algorithm.distill_kl_coef=0.1", "algorithm.distill_top_k=64", "model.teacher_path=t"],
        ["algorithm.distill_kl_coef=0.1", "algorithm.distill_top_k=64", "model.teacher=big", "models.big.path=big"],
        [*SERVED, "algorithm.distill_top_k=300", 'engines.groups=[{model="big", flags=["--max-logprobs=300"]}]'],
        [*SERVED, "algorithm.distill_top_k=300", 'engines.groups=[{model="big", engine="sglang"}]'],
        ["algorithm.advantage=none", "algorithm.objective=tests.unit.algorithms.own_algorithms:reinforce"],
        ["algorithm.advantage=remax", "rollout.samples_per_prompt=1", "algorithm.reward_clip=[-1, 1]"],
    ],
    ids=str,
)
def test_combinations_that_make_sense_pass(sets):
    check(*sets)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["critic.lr=1e-4"], 'critic.lr = 0.0001 would have no effect: it needs algorithm.advantage = "gae"'),
        (["critic.path=critic", 'algorithm.advantage="reinforce_pp"'], 'critic.path = "critic" would have no effect'),
        (['algorithm.loss="sft"', "critic.warmup_rollouts=1"], "critic.warmup_rollouts = 1 would have no effect"),
        (
            ['algorithm.loss="sft"', 'algorithm.advantage="gae"'],
            'algorithm.advantage = "gae" has no meaning with algorithm.loss = "sft"',
        ),
        (['algorithm.advantage="gae"', "model.teacher_path=teacher"], "model.teacher_path would have no effect"),
        (
            ['algorithm.advantage="gae"', "critic.warmup_rollouts=3", "steps=3"],
            "leaves the policy no step to train in: the run has steps = 3",
        ),
        (
            ["algorithm.kl={kind='loss', coef=0.1, estimator='k1'}"],
            'does not depend on the reference; use "k2" or "k3", or unbiased = true',
        ),
        (['algorithm.advantage="distill"'], "needs model.teacher_path"),
        (["model.teacher_path=teacher"], "model.teacher_path would have no effect"),
        (
            [
                'algorithm.advantage="distill"',
                "model.teacher_path=teacher",
                "algorithm.kl={kind='reward', coef=0.1}",
            ],
            "uses no rewards",
        ),
        (["algorithm.overlong_buffer=2000"], "longer than sampling.max_response_tokens = 1024"),
        (
            ['algorithm.advantage="rloo"', "rollout.samples_per_prompt=1"],
            'nothing would be learned; use 2 or more, or algorithm.advantage = "reinforce_pp"',
        ),
        (['algorithm.advantage="no.such.module:f"'], "algorithm.advantage = 'no.such.module:f': no module named 'no'"),
        (['algorithm.objective="tests.unit.algorithms.own_algorithms:reinforse"'], "did you mean 'reinforce'"),
        (
            ['algorithm.old_logprobs="rollout"', "algorithm.is_weights=token"],
            'needs algorithm.old_logprobs = "trainer": it compares',
        ),
        (["algorithm.mask_tokens_older_than=0"], "rollout.max_staleness = 0 lets no token be trained on that is older"),
        (
            ["rollout.max_staleness=2", "algorithm.mask_tokens_older_than=2"],
            "set algorithm.mask_tokens_older_than below rollout.max_staleness",
        ),
        (
            ["rollout.max_staleness=1", "rollout.partial_rollout=true", "algorithm.mask_tokens_older_than=2"],
            "algorithm.mask_tokens_older_than = 2 would have no effect",
        ),
        (['algorithm.loss="sft"', "algorithm.mask_tokens_older_than=1"], 'has no meaning with algorithm.loss = "sft"'),
        (['algorithm.loss="sft"', "epochs_per_rollout=2"], "epochs_per_rollout = 2 has no meaning with algorithm.loss"),
        (["algorithm.advantage.credit=turn"], 'credit = "turn" would have no effect: built-in generation has one turn'),
        (["algorithm.distill_coef=0.1"], "algorithm.distill_coef = 0.1 needs model.teacher_path"),
        (
            [*SERVED, "algorithm.distill_top_k=300", 'engines.groups=[{name="teachers", model="big"}]'],
            r"algorithm.distill_top_k = 300 is more than the engines of group 'teachers' give \(256\): add flags",
        ),
        (["algorithm.distill_kl_coef=0.1"], "algorithm.distill_kl_coef = 0.1 needs model.teacher_path"),
        (["algorithm.advantage=none"], '"none" leaves nothing to learn from: it is for algorithm.distill_kl_coef'),
        *(
            (
                ["algorithm.advantage=none", "algorithm.distill_kl_coef=1.0", "model.teacher_path=t", setting],
                f"{setting.partition('=')[0]} = .* would have no effect: .* has no policy gradient",
            )
            for setting in (
                "algorithm.objective=cispo",
                "algorithm.distill_coef=0.1",
                "algorithm.is_weights=token",
                "algorithm.entropy=high_entropy",
            )
        ),
        (
            [
                "algorithm.advantage=none",
                "algorithm.distill_kl_coef=1.0",
                "model.teacher_path=t",
                "algorithm.kl={kind='reward', coef=0.1}",
            ],
            'algorithm.kl.kind = "reward" would have no effect: algorithm.advantage = "none" uses no rewards',
        ),
        (['algorithm.loss="sft"', "algorithm.distill_kl_coef=0.1"], 'has no meaning with algorithm.loss = "sft"'),
        (["algorithm.entropy=kl_cov"], "with one optimizer step a rollout the policy is still the old one"),
        (
            ["algorithm.advantage=distill", "model.teacher_path=teacher", "algorithm.reward_clip=[-1.0, 1.0]"],
            r"algorithm.reward_clip = \[-1.0, 1.0\] would have no effect: it needs an algorithm.advantage that is made",
        ),
        (["algorithm.advantage=distill", "model.teacher=big"], r'"big" is no model of the run \(none\): name its path'),
        (["algorithm.advantage=remax", "rollout.agent='a:b'"], "needs a greedy episode of each prompt"),
        (["algorithm.advantage=remax", "reward.group=rank"], 'reward.group = "rank" contradict each other'),
        (["algorithm.advantage=remax", "algorithm.overlong_buffer=10"], "of sampled responses alone"),
        (["model.teacher=big", "models.big.path=big"], "model.teacher would have no effect"),
        (
            ["algorithm.advantage=distill", "model.teacher=big", "models.big.external=['h:1']"],
            "model.teacher needs models.big.path",
        ),
        (
            ["algorithm.distill_coef=0.1", "model.teacher=big", "models.big.path=big", "sampling.temperature=0.7"],
            "model.teacher scores at temperature 1, and sampling.temperature is 0.7",
        ),
        (
            ["algorithm.distill_coef=0.1", "model.teacher=big", "models.big.path=big", "model.teacher_path=t"],
            "each a whole teacher: keep one of them",
        ),
        (["algorithm.advantage=gdpo"], r"needs \[\[reward.parts\]\]: it normalises each of several rewards"),
        (["algorithm.advantage=gdpo", PARTS, "reward.group=rank"], 'reward.group = "rank" would have no effect'),
        (["algorithm.advantage=gdpo", PARTS, "algorithm.reward_clip=[-1, 1]"], "made from one reward a sample"),
        (
            ["algorithm.advantage=gdpo", PARTS, "algorithm.kl={kind='reward', coef=0.1}"],
            'algorithm.kl.kind = "reward" would have no effect: algorithm.advantage = "gdpo" is made of',
        ),
        (['algorithm.loss="sft"', 'algorithm.old_logprobs="rollout"'], 'has no meaning with algorithm.loss = "sft"'),
        (
            ['algorithm.loss="sft"', "algorithm.entropy={kind='bonus', coef=0.1}"],
            'algorithm.entropy = {kind = "bonus", coef = 0.1} has no meaning with algorithm.loss = "sft"',
        ),
    ],
    ids=str,
)
def test_combinations_that_make_no_sense_are_refused_with_the_fix(sets, message):
    with pytest.raises(UsageError, match=message):
        check(*sets)


WITHOUT_EFFECT = {
    "reward_clip": ("[-1.0, 1.0]", ["advantage=distill"]),
    "distill_coef": ("0.1", ["advantage=distill"]),
    "distill_top_k": ("64", ["distill_coef=0.1"]),
    "overlong_buffer": ("10", ["advantage=distill"]),
    "overlong_penalty": ("0.5", []),
    "entropy": ("high_entropy", ["old_logprobs=rollout"]),
    "loss_length": ("9", []),
    "is_weights": ("token", ["old_logprobs=rollout"]),
    "is_mask": ("sequence", ["old_logprobs=rollout"]),
    "is_veto": ("1e-3", ["old_logprobs=rollout"]),
}
"""Setting -> (a value, others beside which it does nothing)."""


def test_each_setting_that_depends_on_another_is_tried():
    assert set(WITHOUT_EFFECT) == set(EFFECTIVE) <= set(AlgorithmConfig.model_fields)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_setting_that_would_have_no_effect_is_refused_by_name(name):
    value, others = WITHOUT_EFFECT[name]
    with pytest.raises(
        UsageError,
        match=rf"algorithm\.{name} = .* would have no effect: it needs .*; set that, or leave algorithm\.{name} out",
    ):
        check(f"algorithm.{name}={value}", *(f"algorithm.{other}" for other in others))


@pytest.mark.parametrize(
    ("table", "kind", "key", "of"),
    [
        ("objective", "sapo", "ratio", "ppo or cispo"),
        ("objective", "sapo", "clip_low", "ppo or cispo"),
        ("objective", "reinforce", "clip_high", "ppo or cispo"),
        ("objective", "ppo", "temperature_pos", "sapo"),
        ("objective", "cispo", "temperature_neg", "sapo"),
        ("objective", "cispo", "dual_clip", "ppo"),
        ("objective", "tests.unit.algorithms.own_algorithms:reinforce", "ratio", "ppo or cispo"),
        ("advantage", "rloo", "credit", "grpo or reinforce_pp or gae"),
        ("advantage", "gae", "turn_gamma", "grpo"),
        ("advantage", "rloo", "normalize_std", "grpo"),
        ("advantage", "gdpo", "normalize_std_over", "grpo"),
        ("advantage", "grpo", "gamma", "reinforce_pp or reinforce_pp_baseline or gae"),
        ("advantage", "reinforce_pp", "gae_lambda", "gae"),
        ("advantage", "grpo", "value_clip", "gae"),
        ("kl", "none", "coef", "loss or reward"),
        ("kl", "none", "target", "loss or reward"),
        ("kl", "none", "reference_update_steps", "loss or reward"),
        ("kl", "reward", "unbiased", "loss"),
        ("entropy", "none", "coef", "bonus or kl_cov"),
        ("entropy", "kl_cov", "target", "bonus"),
        ("entropy", "bonus", "fraction", "high_entropy or kl_cov"),
        (
            "advantage",
            "tests.unit.algorithms.own_algorithms:centred",
            "gamma",
            "reinforce_pp or reinforce_pp_baseline or gae",
        ),
    ],
)
def test_a_key_of_another_kind_cannot_be_written(table, kind, key, of):
    with pytest.raises(ConfigError, match=rf"{table}\.{key} is a key of kind = {of}, and .*{table}.kind is"):
        check(f"algorithm.{table}={kind}", f"algorithm.{table}.{key}=0.5")
    named = "own" if ":" in kind else kind
    with pytest.raises(ValueError, match=f"{table}.{named}.{key}"):
        AlgorithmConfig(**{table: {"kind": named, key: 0.5}})


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("is_weights", "cap"),
        ("is_weights", "floor"),
        ("is_weights", "normalize"),
        ("is_mask", "low"),
        ("is_mask", "high"),
    ],
)
def test_a_key_of_a_correction_that_is_not_made_cannot_be_written(table, key):
    with pytest.raises(ConfigError, match=rf"{table}\.{key} is a key of kind = token or .*{table}.kind is none"):
        check("algorithm.is_weights.kind=none", f"algorithm.{table}.{key}=0.5")
    with pytest.raises(ValueError, match=f"{table}.none.{key}"):
        AlgorithmConfig(**{table: {key: 0.5}})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.advantage=grpo2", "algorithm.advantage"),
        ("algorithm.advantage.turn_gamma=0.5", 'turn_gamma = 0.5 would have no effect: it needs credit = "turn"'),
        (
            'algorithm.advantage={normalize_std=false, normalize_std_over="batch"}',
            'normalize_std_over = "batch" would have no effect: it needs normalize_std = true',
        ),
        ("algorithm.objective.dual_clip=1.0", "algorithm.objective.dual_clip"),
        ("algorithm.objective.clip_low=1.5", "algorithm.objective.clip_low"),
        ('algorithm.is_mask={kind="token", low=2.5}', "every token would be masked"),
        ('algorithm.is_weights={kind="token", floor=2.0}', "every weight would be the same"),
        ("algorithm.kl.kind=loss", "algorithm.kl.coef is required"),
        ("algorithm.kl={kind='loss', coef=0.0}", "algorithm.kl.coef"),
        ("algorithm.entropy=bonus", "no effect with coef = 0 and without target"),
        ("algorithm.entropy={kind='high_entropy', fraction=1.0}", "algorithm.entropy.fraction"),
        ("algorithm.reward_clip=[1.0, -1.0]", "would make all rewards equal"),
        ("algorithm.objective.clip_high=nan", "algorithm.objective.clip_high"),
        ("algorithm.is_veto=1.0", "algorithm.is_veto"),
        ("epochs_per_rollout=0", "epochs_per_rollout"),
    ],
)
def test_a_value_out_of_bounds_is_refused_where_it_is_written(setting, message):
    with pytest.raises(ConfigError, match=message):
        check(setting)


def test_what_needs_the_old_policy_before_the_training_forward_says_so():
    assert not AlgorithmConfig(kl={"kind": "loss", "coef": 0.1}).needs_old_logprobs
    for settings in ({"is_weights": "token"}, {"is_mask": "token", "is_weights": "token"}):
        assert not AlgorithmConfig(**settings).needs_old_logprobs, "made in the training forward"
    for settings in (
        {"is_weights": "sequence"},
        {"is_mask": "geometric"},
        {"is_weights": {"kind": "token", "normalize": True}},
        {"kl": {"kind": "reward", "coef": 0.1}},
        {"advantage": "distill"},
        {"distill_coef": 0.1},
        {"is_veto": 1e-4},
        {"entropy": {"kind": "high_entropy", "fraction": 0.2}},
        {"entropy": {"kind": "kl_cov", "fraction": 1e-3}},
        {"advantage": "a:b"},
    ):
        assert AlgorithmConfig(**settings).needs_old_logprobs


@pytest.mark.parametrize(
    ("setting", "example"),
    [
        ("algorithm.advantage=gpg", "advantage = .examples.algorithms:gpg"),
        ("algorithm.advantage.kind=opo", "advantage = .examples.algorithms:opo"),
        ("algorithm.objective={kind='gmpo', clip_low=0.1}", "objective = .examples.algorithms:gmpo"),
        ("algorithm.clip_cov_fraction=0.1", "advantage = .examples.algorithms:clip_cov"),
    ],
)
def test_what_became_an_example_is_refused_with_its_name(setting, example):
    with pytest.raises(ConfigError, match=rf"algorithm\.{example}.*examples/algorithms.py"):
        check(setting)
