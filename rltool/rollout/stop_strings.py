"""Stop strings, checked on the token ids that were sampled: what is trained on is exactly what the policy sampled.

A response ends with the token that completes a stop string. That token stays whole, with what else is in it: cutting
text and tokenising it again would give tokens that were never sampled. Engines that decode while they generate stop
there by themselves; the same cut is made here for all, so that engines cannot differ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from rltool.engines.types import Completion, GenerateRequest

Decode = Callable[[Sequence[int]], str]


def cut_at_stop(completion: Completion, request: GenerateRequest, decode: Decode) -> Completion:
    """The completion up to the token that completes one of request.sampling.stop, with finish_reason "stop"; the
    completion itself where none occurs.

    A stop string may begin in what the response held before (request.continues tokens at the end of the prompt), and
    counts only where it ends behind the first `min_tokens` tokens of this completion, as engines have it.
    """
    stops = [stop for stop in request.sampling.stop if stop]
    if not stops or not completion.token_ids:
        return completion
    # A token that is text has at least a character, so the beginning of a stop string has no more tokens than it has
    # characters.
    known = request.prompt_ids[len(request.prompt_ids) - request.continues :][-max(map(len, stops)) :]
    behind = len(decode((*known, *completion.token_ids[: request.sampling.min_tokens])))

    def holds_stop(count: int) -> bool:
        text = decode((*known, *completion.token_ids[:count]))
        return any(text.find(stop, max(0, behind - len(stop) + 1)) >= 0 for stop in stops)

    size = len(completion.token_ids)
    if not holds_stop(size):
        return completion
    end = 1 + bisect_left(range(1, size + 1), True, key=holds_stop)
    return completion.first(end)
