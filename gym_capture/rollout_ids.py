"""Rollout ids: their form is checked before the id touches a file name, a log or a metric label."""

from __future__ import annotations

import re
from typing import Final

from gym_capture.errors import InvalidRolloutIdError

ROLLOUT_ID_PATTERN: Final = "[A-Za-z0-9_.-]{1,128}"
"""All of a rollout id; beside it, `.` and `..` are none (`check_rollout_id`)."""
_ROLLOUT_ID: Final = re.compile(ROLLOUT_ID_PATTERN)


def check_rollout_id(rollout_id: str) -> str:
    """Returns the id, or raises `InvalidRolloutIdError`: ids become file names, log fields and metric labels."""
    if _ROLLOUT_ID.fullmatch(rollout_id) is None or rollout_id in (".", ".."):
        shown = rollout_id if len(rollout_id) <= 64 else rollout_id[:61] + "..."
        raise InvalidRolloutIdError(
            f"invalid rollout id {shown!r}: use 1 to 128 of A-Z a-z 0-9 _ . - (and not '.' or '..')"
        )
    return rollout_id
