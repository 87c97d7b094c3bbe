"""A rollout of one's own: of twice as many prompts as a batch has, those whose answers differ the most."""

from statistics import pstdev

from rltool.api import Group, RolloutContext, all_of


async def the_most_open(context: RolloutContext) -> list[Group]:
    """rollout.function = "examples.rollout:the_most_open"."""
    good: list[Group] = []
    while len(good) < context.count:
        groups = context.groups(2 * (context.count - len(good)))
        reasons = await all_of(sample_and_score(group, context) for group in groups)
        good += [group for group, reason in zip(groups, reasons, strict=True) if reason is None]
    good.sort(key=lambda group: pstdev(sample.reward or 0.0 for sample in group.samples), reverse=True)
    return good[: context.count]


async def sample_and_score(group: Group, context: RolloutContext) -> str | None:
    await context.generate(group)
    return await context.score(group)
