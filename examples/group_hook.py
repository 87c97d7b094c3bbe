"""Post-processing of samples: answers that were cut off count in the baseline, and get no loss."""

from rltool.api import Sample, SampleStatus


def without_the_cut_off(group: list[Sample]) -> None:
    """rollout.group_hook = "examples.group_hook:without_the_cut_off"."""
    for sample in group:
        sample.remove_sample = sample.status is SampleStatus.TRUNCATED
