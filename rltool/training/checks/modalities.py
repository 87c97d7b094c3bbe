"""Who in a run takes more than text, and what is refused for the sake of those who do not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.mismatch import most_different_sample
from rltool.config.train import TrainConfig
from rltool.engines.types import TEXT_ALONE
from rltool.errors import TrainingStopped, UsageError
from rltool.models.base import Family
from rltool.models.pictures import Pictures, Place, check_places, places_of
from rltool.models.registry import family_for, read_hf_config
from rltool.rollout.multimodal import named
from rltool.rollout.pictures import PROCESSORS, PictureReader
from rltool.rollout.sample import Sample
from rltool.rollout.tokenizer import Tokenizer, load_tokenizer

OF_ONE_SAMPLE = 4
"""A sample's mean difference varies more than that of all samples together."""


def training_refusal(config: TrainConfig, kinds: Collection[str]) -> str | None:
    """Why a run that trains does not take rows with these kinds of input; None: it does."""
    return _trainers(config, kinds) or generation_refusal(config, kinds)


def generation_refusal(config: TrainConfig, kinds: Collection[str]) -> str | None:
    """Why rollouts without a trainer are not sampled from rows with these kinds of input; None: they are."""
    rollout = config.rollout
    if not kinds or any((rollout.generate_function, rollout.environment, rollout.agent)):
        return None
    if {"image"}.issuperset(kinds) and _pictures(config) is not None:
        return None
    return (
        f"{named(kinds)}, and the built-in generation {TEXT_ALONE}: it sends token ids; give a "
        "rollout.generate_function that sends them, or leave them out (columns: data.multimodal_keys = {})"
    )


def check_samples(config: TrainConfig, samples: Sequence[Sample]) -> None:
    """TrainingStopped for a sample with inputs that the trainer cannot read: it would be trained as if the policy had
    not seen them."""
    for sample in samples:
        refused = _trainers(config, sample.multimodal_inputs) if sample.multimodal_inputs else None
        if refused is None and sample.multimodal_inputs:
            refused = _disagrees(sample, _family(config))
        if refused is not None:
            raise TrainingStopped(f"sample {sample.group_id}/{sample.index} (row {sample.prompt_index}) has {refused}")


def check_each_sample(batch: TrainBatch, logprobs: Tensor, selection: Tensor, limit: float) -> None:
    """TrainingStopped for a batch with a sample on whose selected tokens the trainer's log-probabilities, [T], differ
    from the engine's by far more than `limit`, nats: the mean over all samples hides one whose pictures are wrong."""
    assert batch.rollout_logprobs is not None and batch.picture_places is not None
    number, most = most_different_sample(logprobs, batch.rollout_logprobs, selection, batch.lengths)
    if most <= OF_ONE_SAMPLE * limit:
        return
    pictures = int(batch.picture_places.lengths[number]) // len(Place._fields)
    raise TrainingStopped(
        f"trainer and engines disagree on sample {number} of this batch, which has {pictures} pictures: mean "
        f"|log-probability difference| {most:.2e}, and {OF_ONE_SAMPLE} x monitor.logprob_difference_limit = {limit:g} "
        "is what rounding explains. Do both see the same pictures?"
    )


def _disagrees(sample: Sample, family: Family) -> str | None:
    """Why what a sample has of pictures is not of its tokens."""
    if not sample.picture_places:
        return "images, and no picture_places that say which of its tokens are theirs"
    places, count = places_of(sample.picture_places), len(sample.multimodal_inputs.get("image", ()))
    if len(places) != count:
        return f"{count} images, and picture_places of {len(places)}"
    assert family.pictures is not None
    try:
        check_places([*sample.prompt_ids, *sample.response_ids], places, family.pictures)
    except ValueError as error:
        return f"images, and {error}"
    return None


def shown_pictures(config: TrainConfig) -> Pictures | str:
    """How a run reads those that agents send and environments show, or why it takes none."""
    found, refused = _pictures(config), _settings(config)
    if found is None:
        return f"{config.model.path} has no image processor, or the trainer {TEXT_ALONE} of it"
    return found if refused is None else f"{refused} is not implemented with pictures"


def picture_reader(config: TrainConfig) -> PictureReader | None:
    """Of a model that takes pictures; None for others."""
    pictures, rollout = _pictures(config), config.rollout
    shown_later = config.algorithm.loss == "policy" and (rollout.environment or rollout.agent) is not None
    if pictures is None:
        return None
    return PictureReader(pictures, config.model.path, config.data.media_root, shown_later=shown_later)


def run_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of the run, which reads pictures where its model does."""
    return load_tokenizer(
        config.model.path, stop_token_ids=config.sampling.stop_token_ids, chat_template=config.data.chat_template,
        trust_remote_code=config.model.trust_remote_code, pictures=picture_reader(config),
    )  # fmt: skip


def _pictures(config: TrainConfig) -> Pictures | None:
    """None for a directory without an image processor, which is trained as text, and for a model that the trainer does
    not have, which engines may serve to rollouts alone."""
    if not _has_processor(config):
        return None
    try:
        return _family(config).pictures
    except UsageError:
        return None


def _has_processor(config: TrainConfig) -> bool:
    return any((config.model.path / name).is_file() for name in PROCESSORS)


def _family(config: TrainConfig) -> Family:
    return family_for(read_hf_config(config.model.path), config.model.family)


def _trainers(config: TrainConfig, kinds: Collection[str]) -> str | None:
    family = _family(config)
    if family.modalities.issuperset(kinds):
        refused = _settings(config) if kinds else None
        return None if refused is None else f"images, and {refused} is not implemented with pictures"
    return (
        f"{named(set(kinds) - family.modalities)}, and the trainer's {family.architecture} {TEXT_ALONE}: leave them "
        "out (columns: data.multimodal_keys = {}), or sample without training, with a rollout.generate_function and "
        "`rltool debug rollout-only`"
    )


def _settings(config: TrainConfig) -> str | None:
    """Which of them does not go with pictures."""
    trainer, algorithm = config.trainer, config.algorithm
    refused = {
        f"{config.model.path}, which has no image processor ({PROCESSORS[0]}),": not _has_processor(config),
        f"trainer.context_parallel = {trainer.context_parallel}": trainer.context_parallel > 1,
        "trainer.shared_prefixes = true": trainer.shared_prefixes,
        "a critic": algorithm.uses_critic,
        "model.teacher_path": config.model.teacher_path is not None,
    }
    return next((what for what, is_set in refused.items() if is_set), None)
