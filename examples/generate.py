"""Generation in two turns: the policy answers, is asked to check itself, and answers again."""

from dataclasses import replace
from uuid import uuid4

from rltool.api import GenerateContext, GenerateRequest, Sample

CHECK = " check:"


async def second_try(group: list[Sample], context: GenerateContext) -> None:
    """rollout.generate_function = "examples.generate:second_try"."""
    asked = context.tokenizer.encode_rendered(CHECK) if context.tokenizer is not None else [4]
    budget = max(1, (context.sampling.max_tokens - len(asked)) // 2)
    for sample in group:
        for turn, said in enumerate(([], asked)):
            if said:
                sample.append_environment_tokens(said)  # no loss on what the policy did not sample
            request = GenerateRequest(
                prompt_ids=(*sample.prompt_ids, *sample.response_ids),
                sampling=replace(context.sampling, max_tokens=budget),
                request_id=uuid4().hex,
                seed=((sample.seed or 0) + turn) % 2**31,
                session=sample.session,
            )
            [completion] = await context.generate(request)
            sample.append_response_tokens(completion)
