"""An agent written with smolagents, as a program that the `command` harness runs.

It finds its task, the policy and its token in the environment, and prints its answer.
"""

import os
from pathlib import Path

from smolagents import CodeAgent, LogLevel, OpenAIServerModel


def as_generated(step, agent):
    step.tool_calls = None  # else it writes what it ran into the turn, in words of its own


model = OpenAIServerModel(
    os.environ["GYM_CAPTURE_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = CodeAgent(
    tools=[],
    model=model,
    max_steps=8,
    step_callbacks=[as_generated],
    verbosity_level=LogLevel.OFF,
)
print(agent.run(Path(os.environ["GYM_CAPTURE_TASK_FILE"]).read_text()))
