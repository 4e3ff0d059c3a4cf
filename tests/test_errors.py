"""What the module of errors says of all of them, held against the code."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import gym_capture
from gym_capture import errors
from gym_capture.errors import GymCaptureError, StoreError, described

ROOT = Path(gym_capture.__file__).parents[1]
SOURCES = {
    str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8"))
    for name in ("gym_capture", "trainer_bridge")
    for file in sorted((ROOT / name).rglob("*.py"))
}


def test_the_tree_in_the_docs_is_the_tree_of_classes() -> None:
    drawn: dict[str, str] = {}
    above = ["GymCaptureError"]
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│ ]*)[├└]── (?:\.\.\.)?(\w+)", line)
        if found is not None:
            depth = len(found[1]) // 4
            drawn[found[2]] = above[depth]
            above[depth + 1 :] = [found[2]]
    made = {
        node.name: ast.unparse(node.bases[0])
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases and node.name.endswith("Error")
    }
    # A check that does not hold is a failed assertion.
    # Those of a remote agent's reply never leave their harness.
    replies = {"ReplyError": "ValueError", "NotJsonError": "ReplyError"}
    assert made == {**drawn, **replies, "GymCaptureError": "Exception", "ConformanceError": "AssertionError"}


def _takes_all(handler: ast.ExceptHandler) -> bool:
    """Whether it catches whatever may come, and does not just clean up and pass it on."""
    kinds = [] if handler.type is None else [ast.unparse(kind) for kind in ast.walk(handler.type)]
    passes_on = isinstance(last := handler.body[-1], ast.Raise) and last.exc is None
    return (handler.type is None or not {"Exception", "BaseException"}.isdisjoint(kinds)) and not passes_on


def test_exception_itself_is_caught_at_the_boundaries_that_are_named_and_nowhere_else() -> None:
    caught = [
        file.removeprefix("gym_capture/").removesuffix(".py").replace("/", ".")
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and _takes_all(node)
    ]
    # Twice in the gateway: before a reply begins, and while it streams.
    assert sorted(caught) == [
        "commands.loading",
        "data.groups",
        "engines.vllm_weights",
        "serving.gateway",
        "serving.gateway",
        "serving.state_client",
        "serving.state_shard",
        "serving.weights_agent",
    ]
    paragraph = (errors.__doc__ or "").split("`Exception` itself")[1].split("\n\n")[0]
    assert set(re.findall(r"`([\w.]+)`", paragraph)) == set(caught)


def test_what_a_client_is_told_is_made_in_one_module() -> None:
    makers = {
        file
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ApiError")
    }
    assert makers == {"gym_capture/serving/errors.py"}


def test_what_was_raised_is_told_with_its_place_and_at_bounded_length() -> None:
    assert described(ValueError("never raised")) == "ValueError: never raised"
    try:
        raise ValueError("x" * 1000)
    except ValueError as error:
        told = described(error)
    assert re.fullmatch(r"ValueError: x{488} \(at test_errors\.py:\d+\)", told)


def test_an_error_travels_between_processes_with_all_that_it_says() -> None:
    error = StoreError("no", rollout_id="r", call_id="c")
    back = pickle.loads(pickle.dumps(error))
    assert isinstance(back, GymCaptureError)
    assert (type(back), str(back), back.__dict__) == (StoreError, "no (rollout r, call c)", error.__dict__)
