"""Where in a prompt the turn that is to be generated begins: at its generation prompt.

Invariant: what is found depends on what the template writes for this conversation, not on how the prompt came about.
Whether the model is thinking at the end of a prompt is written there, and nowhere before: earlier turns have thinking
of their own, which a prompt that continues their exact ids shows.

Flow: render with and without the generation prompt -> what the first has more is its text -> how many of the prompt's
last ids spell it.
"""

from __future__ import annotations

from gym_capture.capture.records import IdArray
from gym_capture.conversation import Conversation, ToolResult
from gym_capture.splice.template import ChatTemplate, TemplateError


def turn_start(template: ChatTemplate, conversation: Conversation, prompt_ids: IdArray) -> int | None:
    """The position in `prompt_ids`, the prompt of `conversation`, of the first id of the generation prompt.

    None where it cannot be told: the template refuses one of the renderings, or writes nothing after tool results
    because the turn that made the calls goes on.
    """
    try:
        prompted = template.render(conversation, add_generation_prompt=True)
        plain = template.render(conversation, add_generation_prompt=False)
    except TemplateError:
        return None
    opening = prompted[_common_length(prompted, plain) :]
    size: int = prompt_ids.size
    if not opening:
        return None if conversation.items and isinstance(conversation.items[-1], ToolResult) else size
    expected: int = template.encode(opening).size
    # Not always so many: a token can begin in what is before it.
    lengths: list[int] = [expected, *range(1, min(size, expected + len(opening)) + 1)]
    for length in lengths:
        if template.decode(prompt_ids[size - length :]).endswith(opening):
            return size - length
    return None


def _common_length(left: str, right: str) -> int:
    """How many characters the two begin with in common."""
    if left.startswith(right):
        return len(right)
    differ = (n for n, (ours, theirs) in enumerate(zip(left, right, strict=False)) if ours != theirs)
    return next(differ, len(left))
