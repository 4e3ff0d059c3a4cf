"""What the fault tests share."""

from __future__ import annotations

import pytest

from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir


@pytest.fixture(scope="session")
def template() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())
