"""A batch as training sees it: the best and the worst answers of each prompt, which say most."""

from collections import defaultdict

from rltool.api import Sample

KEPT = 4
"""Of each prompt. The baseline is then that of the samples that are left."""


def the_extremes(samples: list[Sample]) -> list[Sample]:
    """rollout.batch_hook = "examples.batch_hook:the_extremes"."""
    groups: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    kept: list[Sample] = []
    for group in groups.values():
        group.sort(key=lambda sample: sample.reward or 0.0)
        kept += group if len(group) <= KEPT else [*group[: KEPT // 2], *group[-KEPT // 2 :]]
    return kept
