"""`gym-capture inspect`: one rollout in the terminal - the tree of its calls, and its trajectories token by token.

Invariant: nothing is changed, and nothing is shown that `gym-capture ui` would not show: both have the same views.

Flow: a path, or the URL of a graph -> what it leads to (`inspector.find`), or the graph's own inspector -> the JSON of
`inspector.views` -> a tree and tables (`inspect_view`), or that JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol
from urllib.parse import quote

import httpx
import typer

from gym_capture.commands.looking import (
    ModelOption,
    ReadToken,
    RecordsOption,
    SecretFile,
    SourceArgument,
    path_of,
    read_token,
    url_of_graph,
)
from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from gym_capture.inspector.pieces import Vocabulary
    from gym_capture.inspector.seen import SeenRollout
    from gym_capture.inspector.table import Row

_ANSWERS_WITHIN_S: Final = 60.0
_NO_CALLS: Final = "no call of it is on record"
_IN_RECORDS: Final = "its calls are in the graph's records: --records DIRECTORY, the graph's `state.directory`"


class _Views(Protocol):
    """The views of one rollout, wherever they come from."""

    without_calls: str
    """What to say if there is no call of it."""

    def rollout(self) -> dict[str, Any]: ...
    def trajectories(self) -> list[dict[str, Any]]: ...
    def tokens(self, trajectory: int, begin: int) -> dict[str, Any]: ...


def command(
    context: typer.Context,
    rollout: Annotated[str, typer.Argument(help="The rollout's id.")],
    source: SourceArgument = None,
    model: ModelOption = None,
    records: RecordsOption = None,
    secret_file: SecretFile = None,
    token: ReadToken = None,
    full: Annotated[bool, typer.Option("--full", help="All tokens, where else long stretches are cut short.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON; tokens with --full.")] = False,
) -> None:
    """Show a rollout: which call continues which and how, what was trained and what was not, and why.

    Texts of tokens are shown with --model; without it, what is on record of the calls.
    """
    if (url := url_of_graph(source, context)) is not None:
        _show(_OfGraph(url, rollout, read_token(secret_file, token)), full=full, as_json=as_json)
        return
    _show(_on_disk(path_of(source), rollout, model, records), full=full, as_json=as_json)


def _show(views: _Views, *, full: bool, as_json: bool) -> None:
    from gym_capture.commands.inspect_view import show

    seen, trajectories = views.rollout(), views.trajectories()
    for number, trajectory in enumerate(trajectories):
        if full or not as_json:
            trajectory["pages"] = list(_pages(views, number, trajectory["tokens"]))
    if as_json:
        typer.echo(json.dumps(seen | {"trajectories": trajectories}))
        return
    show(seen, trajectories, full=full, without_calls=views.without_calls)
    if any(None in page["texts"] for each in trajectories for page in each["pages"]):
        typer.echo(
            "ids without texts: --model FOLDER spells them, or the URL of the graph in place of a path", err=True
        )


def _pages(views: _Views, trajectory: int, total: int) -> Iterator[dict[str, Any]]:
    begin = 0
    while begin < total:
        page = views.tokens(trajectory, begin)
        yield page
        begin = page["to"]


# --- on disk ----------------------------------------------------------------------------------------------------------


def _on_disk(path: Path, rollout_id: str, model: Path | None, records: Path | None) -> _OnDisk:
    """Raises `ConfigError` if there is no such rollout."""
    from gym_capture.inspector.find import open_path
    from gym_capture.inspector.pieces import Vocabulary
    from gym_capture.inspector.source import Options
    from gym_capture.inspector.table import Table

    vocabulary = None if model is None else Vocabulary.of_folder(model)
    options = Options(special=frozenset() if vocabulary is None else vocabulary.special)
    source = open_path(path, options, records=records)
    try:
        table, is_more = Table(), True
        while is_more:
            look = source.look()
            for basics in look.changed:
                table.put(basics, 0.0)
            is_more = look.is_more
        seen = source.read(rollout_id)
    finally:
        source.close()
    if seen is None:
        raise ConfigError(_unknown(rollout_id, list(table.rows), source.found()))
    table.fill(seen)
    wants_records = source.shows.job and not source.shows.records
    return _OnDisk(
        seen, table.rows.get(rollout_id), vocabulary, without_calls=_IN_RECORDS if wants_records else _NO_CALLS
    )


def _unknown(rollout_id: str, there: list[str], where: str) -> str:
    near = get_close_matches(rollout_id, there, n=1) or [name for name in there if rollout_id in name][:1]
    meant = f"did you mean {near[0]!r}? " if near else ""
    some = f"there are {len(there):,}, e.g. {there[0]!r}" if there else "there is none"
    return f"no rollout {rollout_id!r} in {where}: {meant}{some}"


class _OnDisk:
    def __init__(
        self, seen: SeenRollout, row: Row | None, vocabulary: Vocabulary | None, *, without_calls: str
    ) -> None:
        self.without_calls = without_calls
        self._seen = seen
        self._row = row
        self._vocabulary = vocabulary

    def rollout(self) -> dict[str, Any]:
        from gym_capture.inspector.views import rollout_view

        return rollout_view(self._seen, self._row, cursor="")

    def trajectories(self) -> list[dict[str, Any]]:
        from gym_capture.inspector.views import trajectories_view

        return trajectories_view(self._seen, self._row, self._vocabulary)

    def tokens(self, trajectory: int, begin: int) -> dict[str, Any]:
        from gym_capture.inspector.views import MOST_TOKENS, tokens_view

        return tokens_view(self._seen.trajectories[trajectory], begin, begin + MOST_TOKENS, self._vocabulary)


# --- of a graph -------------------------------------------------------------------------------------------------------


class _OfGraph:
    """As the graph's own inspector shows it."""

    without_calls = _NO_CALLS

    def __init__(self, url: str, rollout_id: str, token: str | None) -> None:
        self._at = f"{url.rstrip('/').removesuffix('/inspect')}/inspect/api/rollouts/{quote(rollout_id, safe='')}"
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    def rollout(self) -> dict[str, Any]:
        found: dict[str, Any] = self._asked("", dict)
        return found

    def trajectories(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._asked("/trajectories", list)
        return found

    def tokens(self, trajectory: int, begin: int) -> dict[str, Any]:
        path = f"/trajectories/{trajectory}/tokens?from={begin}&to={begin + 2**30}"
        found: dict[str, Any] = self._asked(path, dict)
        return found

    def _asked(self, path: str, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
        try:
            answer = httpx.get(self._at + path, headers=self._headers, timeout=_ANSWERS_WITHIN_S, trust_env=False)
            found: Any = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"no graph answers at {self._at}: {error or type(error).__name__}") from None
        except ValueError:
            raise ConfigError(f"what answers at {self._at} is no graph with an inspector") from None
        if answer.status_code in (401, 403):
            raise ConfigError(f"{self._at}: the graph wants its read token: --secret-file, or --token")
        if answer.status_code != 200:
            raise ConfigError(f"{self._at}: HTTP {answer.status_code}: {json.dumps(found)}")
        if not isinstance(found, kind) or (not path and "calls" not in found):
            raise ConfigError(f"what answers at {self._at} is no graph with an inspector")
        return found
