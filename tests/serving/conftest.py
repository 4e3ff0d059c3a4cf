"""What the tests of the serving side share."""

from __future__ import annotations

import pytest

from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir


@pytest.fixture(scope="session")
def template() -> HfChatTemplate:
    """A real tokenizer with the project's own chat template."""
    return HfChatTemplate.from_model_dir(tiny_dir())
