"""An evaluation: how often the answer that most samples of a prompt give is right (majority voting)."""

from collections import Counter, defaultdict

from rltool.api import EvalContext, EvalSet, Sample


async def majority(eval_set: EvalSet, context: EvalContext) -> dict[str, float]:
    """eval.function = "examples.evaluation:majority"; recorded as eval/SET/majority."""
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in await context.samples():
        groups[sample.group_id].append(sample)
    return {"majority": sum(map(_reward_of_majority, groups.values())) / len(groups)}


def _reward_of_majority(group: list[Sample]) -> float:
    votes = Counter(tuple(sample.response_ids) for sample in group)
    answer, _ = votes.most_common(1)[0]
    return next(sample.reward or 0.0 for sample in group if tuple(sample.response_ids) == answer)
