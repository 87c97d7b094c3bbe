"""The algorithm of a run, [algorithm] and [critic], as orthogonal choices; rltool/config/algorithm_rules.py has which
of them belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rltool.config.base import Config
from rltool.config.methods import (
    GRPO,
    KL,
    PPO,
    Advantage,
    Entropy,
    Mask,
    NoEntropyControl,
    NoKL,
    Objective,
    Unmasked,
    Unweighted,
    Weights,
)


class AlgorithmConfig(Config):
    """The algorithm as orthogonal choices; those of a paper are TOML fragments in rltool/templates/algorithms (`rltool
    init --algorithm`).

    A setting that has no effect beside the others is refused: rltool/config/algorithm_rules.py.
    """

    loss: Literal["policy", "sft"] = "policy"
    """policy: policy gradient on rollouts; sft: cross-entropy on the data set's `response` (or `label`), no engines
    needed."""

    advantage: Advantage = GRPO()
    """The estimator (rltool/algorithms/advantages.py). What it is set by depends on its `kind`, see below; a kind
    alone, or `package.module:function`, may stand in the place of the table. gdpo normalises each of [[reward.parts]]
    by itself; remax samples a greedy response to each prompt besides; distill needs model.teacher or
    model.teacher_path; gae trains a critic ([critic]); none is no policy gradient, beside distill_kl_coef."""
    whiten_advantages: bool | None = None
    """Mean 0 and standard deviation 1 over all response tokens of the rollout, of all ranks. None: as the estimator's
    paper has it (reinforce_pp, reinforce_pp_baseline and gae: yes; others: no)."""
    distill_coef: float = Field(default=0.0, ge=0)
    """Beside the advantages of another estimator: this times log p_teacher - log p, per token, in nats, added after
    whitening; needs a teacher as well. 0: none."""
    distill_kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(teacher || policy) at each token, in nats, over the teacher's distill_top_k most probable tokens and
    all others as one; a term of the loss, differentiated through the policy's probabilities. Needs a teacher as well.
    0: none."""
    distill_top_k: int = Field(default=20, ge=1)
    """How many of the teacher's tokens distill_kl_coef's term distinguishes. vLLM gives no more than its
    --max-logprobs, 256 where rltool starts it, 20 by its own default."""
    reward_clip: tuple[float, float] | None = None
    """Scored rewards are limited to [low, high] before anything is made of them; None: they are taken as they are."""
    overlong_buffer: int = Field(default=0, ge=0)
    """DAPO's soft length penalty: the reward falls linearly over this many last tokens of sampling.max_response_tokens;
    0: none."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """What a response of full length loses, in units of reward."""

    objective: Objective = PPO()
    """The surrogate (rltool/algorithms/losses.py); what it is set by depends on its `kind`, see below. A kind alone, or
    `package.module:function`, may stand in the place of the table."""
    off_policy_mask_threshold: float | None = Field(default=None, gt=0)
    """No policy loss on tokens with a negative advantage in samples whose mean log(p_engine / p), now in training, is
    above this, in nats (DeepSeek-V3.2); None: no mask."""
    entropy: Entropy = NoEntropyControl()
    """What holds the entropy up or down, see below; a kind alone may stand in the place of the table."""
    routing_replay: bool = False
    """Mixtures of experts: the trainer's policy takes the experts that the engine's router chose for each token in each
    layer (R3), for its old log-probabilities and in training; their weights are its own. Engines are asked directly,
    and are started with return_routed_experts (docs/algorithms.md)."""
    loss_reduction: Literal["token", "sample", "group", "constant"] = "token"
    """token: mean over all response tokens of the global batch; sample: mean over samples of each sample's token mean;
    group: mean over prompt groups of each group's token mean; constant: sum over tokens / (samples x loss_length) (Dr.
    GRPO)."""
    loss_length: int | None = Field(default=None, ge=1)
    """constant: tokens that each sample's sum is divided by; None: sampling.max_response_tokens."""

    kl: KL = NoKL()
    """KL(policy || reference): none, which needs no reference model, in the loss or in the reward; see below."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """The old policy's log-probabilities, which ratios are taken to. trainer: computed again by the trainer before the
    first optimizer step (of tokens of earlier weights this is AReaL's proximal policy); rollout: the engines' own, of
    the weights that sampled each token."""
    exact: bool = False
    """The trainer's log-probabilities are to be those of the vLLM engines bit for bit: it computes with vLLM's own
    batch-invariant kernels, engines of the run are started so (others need `serve-engines --exact`), and one token that
    differs ends the run (docs/algorithms.md). One GPU a model, bfloat16, synchronous."""
    mask_tokens_older_than: int | None = Field(default=None, ge=0)
    """No loss on tokens that were sampled more than this many training steps ago; None: all are trained on."""

    is_weights: Weights = Unweighted()
    """Weights of tokens by how likely the trainer's old policy was to draw them, see below. A kind alone may stand in
    the place of the table, here and in is_mask."""
    is_mask: Mask = Unmasked()
    """Tokens without a policy loss by the same ratio; see below."""
    is_veto: float | None = Field(default=None, gt=0, lt=1)
    """No policy loss on samples in which the ratio of any single token is below this, 1e-4 for example: the engine
    sampled what the trainer finds all but impossible. None: no veto."""

    @model_validator(mode="after")
    def _ranges(self) -> AlgorithmConfig:
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            low, high = self.reward_clip
            raise ValueError(f"reward_clip = [{low:g}, {high:g}] would make all rewards equal; the first is the lower")
        return self

    @property
    def own_advantage(self) -> bool:
        """`advantage` is a function of the user's."""
        return self.advantage.kind == "own"

    @property
    def credits_turns(self) -> bool:
        """Each turn of an episode is judged by itself."""
        return getattr(self.advantage, "credit", "episode") == "turn"

    @property
    def own_objective(self) -> bool:
        """`objective` is a function of the user's."""
        return self.objective.kind == "own"

    def logits_temperature(self, sampling_temperature: float) -> float:
        """What the trainer divides its logits by: the temperature that its tokens were sampled at.

        1 for supervised training, whose targets were not sampled.
        """
        return 1.0 if self.loss == "sft" else sampling_temperature

    @property
    def uses_critic(self) -> bool:
        return self.loss == "policy" and self.advantage.kind == "gae"

    @property
    def uses_reference(self) -> bool:
        return self.loss == "policy" and self.kl.kind != "none"

    @property
    def reference_update_steps(self) -> int:
        """Training steps after which the reference becomes the policy; 0: never."""
        return 0 if self.kl.kind == "none" else self.kl.reference_update_steps

    @property
    def clips_ratio(self) -> bool:
        """The objective limits the ratio to [1 - clip_low, 1 + clip_high]."""
        return self.objective.kind in ("ppo", "cispo")

    @property
    def uses_teacher_logprobs(self) -> bool:
        """The teacher's log-probabilities of the sampled tokens are part of the advantages, or may be."""
        own = self.own_advantage or self.own_objective
        return self.loss == "policy" and (self.advantage.kind == "distill" or self.distill_coef > 0 or own)

    @property
    def uses_teacher_topk(self) -> bool:
        """The teacher's most probable tokens are part of the loss."""
        return self.loss == "policy" and self.distill_kl_coef > 0

    @property
    def needs_greedy_baseline(self) -> bool:
        """The reward of a greedy response to each prompt is part of the advantages."""
        return self.loss == "policy" and self.advantage.kind == "remax"

    @property
    def uses_reward_parts(self) -> bool:
        """Advantages are made of the several rewards of a sample, not of their sum."""
        return self.loss == "policy" and self.advantage.kind == "gdpo"

    @property
    def corrects_mismatch(self) -> bool:
        """Samples are weighted or masked by how likely the trainer's old policy was to draw them."""
        return self.is_weights.kind != "none" or self.is_mask.kind != "none" or self.is_veto is not None

    @property
    def corrects_by_token(self) -> bool:
        """Each token's correction is made of its own log-probabilities, in whichever forward pass they come."""
        by_token = {self.is_weights.kind, self.is_mask.kind} <= {"none", "token"}
        normalized = self.is_weights.kind != "none" and self.is_weights.normalize
        return by_token and self.is_veto is None and not normalized

    @property
    def selects_by_entropy(self) -> bool:
        """The old policy's entropy selects the tokens with a policy loss."""
        return self.entropy.kind == "high_entropy"

    @property
    def weights_policy_loss(self) -> bool:
        """Each token's policy loss has a factor, TrainBatch.is_weights, unless the training forward makes it itself."""
        return self.corrects_mismatch or self.selects_by_entropy

    @property
    def adapts_kl(self) -> bool:
        """kl.coef follows what was measured."""
        return self.kl.kind != "none" and self.kl.target is not None

    @property
    def adapts_entropy(self) -> bool:
        """entropy.coef follows what was measured."""
        return self.entropy.kind == "bonus" and self.entropy.target is not None

    @property
    def needs_old_logprobs(self) -> bool:
        """Advantages or weights are made of the old policy's log-probabilities: they must be known before the training
        forward."""
        kl_in_reward = self.kl.kind == "reward"
        distills = self.advantage.kind == "distill" or self.distill_coef > 0
        selects = self.entropy.kind in ("high_entropy", "kl_cov")
        corrects = self.corrects_mismatch and not self.corrects_by_token
        return self.loss == "policy" and (
            corrects or kl_in_reward or distills or selects or self.own_advantage
        )


class CriticConfig(Config):
    """The critic of algorithm.advantage = "gae": a model of its own on the trainer's ranks, in the trainer's layout and
    dtype, with gradients and an optimizer of its own. It costs the memory of a second trained model. Betas, eps and
    weight decay are [optimizer]'s."""

    path: Path | None = None
    """Weights that it starts from, with a value head of 0 on top: a Hugging Face directory or a checkpoint of ours with
    the policy's vocabulary; None: model.path."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate, constant."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Limit of the gradient norm of the critic; 0 does not clip."""
    warmup_rollouts: int = Field(default=0, ge=0)
    """Steps at the start of the run in which only the critic trains."""
    updates_per_optimizer_step: int = Field(default=1, ge=1)
    """Updates of the critic on the samples of each optimizer step of the policy."""
