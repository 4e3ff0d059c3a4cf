#!/bin/sh
# Claude Code for a policy that is too small to call tools by itself: first it must (--max-turns times), then it is asked
# for its answer, in the same conversation. `tools_first.sh claude -p ...`, as a `program` of the harness.
CLAUDE_CODE_EXTRA_BODY='{"tool_choice": {"type": "any"}}' "$@" > /dev/null
echo 'What is the result? Reply with a number, as in: <answer>12</answer>' | "$@" --continue
