"""Every shell block of the pages, run by bash as a reader would, on one graph that is served: `make test-docs`.

It works in a folder and a home of its own, with what the pages assume: `serve_configs`, `docs/examples`, the files
whose text is in the pages, the commands on the PATH, a model folder, a Ray cluster. The graph is real, its model the
small random one. A command is in order if it ends with 0 - one that goes on until Ctrl-C, with 130 - and says nothing
on stderr that is a traceback or a warning of somebody else's.

Flow: a Ray cluster with a dashboard -> pages in `ORDER`, then the others, then `LAST` -> blocks, command after command
where one of them goes on by itself, else as a whole -> commands in the midst of text -> what failed, and how many were
run. `python -m tests.docs.walk PAGE...` runs the named pages only, after those that make what they use.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from gym_capture.cluster.env import private_cluster_env
from gym_capture.demo.processes import free_port
from gym_capture.models import default_cache, tiny_dir
from tests.docs.pages import PAGES, ROOT
from tests.docs.shell import (
    INLINE,
    Command,
    Placeholders,
    commands,
    commands_of,
    configuration,
    files,
    first_agent,
    in_text,
    shell_blocks,
)

_FIRST: Final = ("docs/quickstart.md", "docs/jobs.md")
"""They serve, and make what the others look at."""
_ORDER: Final = (
    *_FIRST,
    "README.md",
    "docs/api.md",
    "docs/trajectories.md",
    "docs/weights.md",
    "docs/training.md",
    "docs/learning.md",
)
_LAST: Final = ("docs/operations.md",)
"""It ends what is left of a graph that is no longer served."""

BEFORE: Final = {
    "curl -s http://127.0.0.1:8000/stats": "python agent.py http://127.0.0.1:8000",
    "gym-capture build DIR --out OUT": "gym-capture records export --out captures",
    "gym-capture inspect my-rollout ": "python first_agent.py",
}
"""What a page says in words, before the block that begins so."""

GOES_ON: Final = {
    r"gym-capture serve ": r"Ctrl-C ends it",
    r"gym-capture ui\b": r"Ctrl-C ends it",
    r"gym-capture rollouts logs -f": r"\S",
}
"""Commands that go on until Ctrl-C, and what they say once they are ready."""

_NOISE: Final = re.compile(
    r"^Traceback|\(\w+ pid=\d+\)|\b(Future|Deprecation|User|Resource)Warning\b"
    r"|^\[?20\d\d-\d\d-\d\d (?!.*Found multiple active Ray instances).*\b(WARNING|ERROR|INFO|W|E)\b",
    re.MULTILINE,
)
"""Several clusters on a machine, which others use as well, are no fault of a command's: Ray says which one it takes."""
_SHOWS_AN_ENGINE: Final = "gym-capture verify-logprobs"
"""What vLLM says while it starts stands on stderr: of such a command a traceback alone is a fault."""
_READY_WITHIN_S: Final = 600.0
_ENDS_WITHIN_S: Final = 900.0


@dataclass
class Reader:
    """Somebody at a shell in a folder."""

    folder: Path
    environment: dict[str, str]
    names: Placeholders
    served: ExitStack = field(default_factory=ExitStack)
    """Ends the graph."""
    serves: bool = False
    ran: int = 0
    failed: list[str] = field(default_factory=list)

    def page(self, name: str) -> None:
        for block in shell_blocks(ROOT / name):
            told = [command for command in commands_of(block) if command.why_not is None]
            if not told:
                continue
            for first, before in BEFORE.items():
                if told[0].text.startswith(first):
                    self.run(f"{block.where} (before)", before)
            if any(_ready_line(each) for each in told) or any("rollouts submit" in each.text for each in told):
                for command in told:
                    self.one(command)
            else:
                self.run(block.where, "\n".join(command.text for command in told))
            self.ran += len(told)

    def one(self, command: Command) -> None:
        where = command.block.where
        ready = _ready_line(command)
        if ready is None:
            said = self.run(where, command.text)
            if "rollouts submit" in command.text:
                self.names.job_id = said.strip().splitlines()[-1] if said.strip() else "none"
        elif command.text.startswith("gym-capture serve"):
            if not self.serves:  # one that does serves for all pages
                self.serves = self.served.enter_context(self.going_on(where, command.text, ready)) is None
                if not self.serves:
                    raise SystemExit("nothing serves")
        else:
            with self.going_on(where, command.text, ready):
                pass

    def run(self, where: str, text: str) -> str:
        """Runs it to its end. Returns what it printed."""
        filled = "\n".join(map(self.names.filled, text.splitlines()))
        began = time.monotonic()
        try:
            done = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", filled],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ENDS_WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self._judge(where, filled, f"has not ended in {_ENDS_WITHIN_S:.0f} s", "", "", began)
            return ""
        problem = None if done.returncode == 0 else f"exit status {done.returncode}"
        self._judge(where, filled, problem, done.stdout, done.stderr, began)
        return done.stdout

    @contextmanager
    def going_on(self, where: str, text: str, ready: str) -> Iterator[str | None]:
        """Runs it for the length of the block, from when it is ready, and ends it as Ctrl-C does.

        Yields what was wrong, if it is not ready.
        """
        filled = self.names.filled(text)
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {filled}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            problem = _wait_ready(process, (out.fileno(), err.fileno()), ready)
            try:
                yield problem
            finally:
                at_the_end = _ended(process)
                out.seek(0)
                err.seek(0)
                self._judge(where, filled, problem or at_the_end, out.read(), err.read(), began)

    def _judge(self, where: str, text: str, problem: str | None, out: str, err: str, began: float) -> None:
        noises = re.compile("^Traceback", re.MULTILINE) if _SHOWS_AN_ENGINE in text else _NOISE
        if problem is None and (noise := noises.search(err)):
            problem = f"says {noise[0]!r} on stderr"
        shown = text.replace("\n", "\n    ")
        print(f"{'FAIL' if problem else 'ok  '} {where}  {time.monotonic() - began:.0f} s\n    {shown}", flush=True)
        if problem:
            print(f"  {problem}\n{_tail(out)}{_tail(err)}", flush=True)
            self.failed.append(f"{where}: {problem}")


def _tail(text: str) -> str:
    return "".join(f"  | {line}\n" for line in text.splitlines()[-100:])


def _ready_line(command: Command) -> str | None:
    return next((ready for begins, ready in GOES_ON.items() if re.match(begins, command.text)), None)


def _wait_ready(process: subprocess.Popen[bytes], outputs: Sequence[int], ready: str) -> str | None:
    """The problem, if it never is."""
    deadline = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline:
        if any(re.search(ready, os.pread(output, 1 << 20, 0).decode(errors="replace")) for output in outputs):
            return None
        if process.poll() is not None:
            return f"has ended with {process.returncode} before it was ready"
        time.sleep(0.1)
    return f"was not ready in {_READY_WITHIN_S:.0f} s"


def _ended(process: subprocess.Popen[bytes]) -> str | None:
    """Ends it as Ctrl-C does. The problem, if it does not end as it should."""
    if process.poll() is not None:
        return None if process.returncode == 0 else f"exit status {process.returncode}"
    process.send_signal(signal.SIGINT)
    try:
        code = process.wait(180)
    except subprocess.TimeoutExpired:
        process.kill()
        return "does not end at Ctrl-C"
    return None if code == 130 else f"exit status {code} at Ctrl-C"


# --- where it is run --------------------------------------------------------------------------------------------------


def furnished(folder: Path) -> dict[str, str]:
    """Puts into the folder what a reader has, and returns the environment of the shell there."""
    work, home, tools = folder / "work", folder / "home", folder / "bin"
    shutil.copytree(ROOT / "serve_configs", work / "serve_configs")
    shutil.copytree(ROOT / "docs" / "examples", work / "docs" / "examples")
    for block in files():
        assert block.file is not None
        (work / block.file).parent.mkdir(parents=True, exist_ok=True)
        (work / block.file).write_text(block.text, encoding="utf-8")
    (work / "first_agent.py").write_text(first_agent(), encoding="utf-8")
    (work / "my_graph.yaml").write_text(configuration(), encoding="utf-8")
    job = (ROOT / "serve_configs" / "jobs" / "register.yaml").read_text(encoding="utf-8")
    (work / "job.yaml").write_text(
        job.replace("runs/register ", "runs/other ").replace("count: 4", "count: 2"), "utf-8"
    )
    (work / "etc" / "gym-capture").mkdir(parents=True)
    for secret in (work / "secret", work / "etc" / "gym-capture" / "secret"):
        secret.write_text("a secret that a page has had its reader make\n" * 2, "utf-8")
        secret.chmod(0o600)
    (work / "backup").mkdir()
    (work / ".venv").symlink_to(sys.prefix)
    cache = home / ".cache" / "gym-capture"
    cache.mkdir(parents=True)
    default_cache().mkdir(parents=True, exist_ok=True)
    (cache / "models").symlink_to(default_cache())
    tools.mkdir()
    programs = {"gym-capture": f'exec {sys.executable} -m gym_capture.cli "$@"'}
    if shutil.which("rsync") is None:  # not everywhere; this does what one run of it would
        programs["rsync"] = 'mkdir -p "$4" && cp -a "$3." "$4"'
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GYM_CAPTURE_", "XDG_"))}
    return kept | {
        "HOME": str(home),
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{work}",
        "URL": "http://127.0.0.1:8000",
        "TOKEN": "any",
        "BROWSER": "true",
    }


@contextmanager
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """A Ray cluster as `ray start --head` makes it, beside others on this machine. Yields its dashboard's address."""
    dashboard, first = free_port(), free_port()
    environment |= private_cluster_env(
        metrics_port=free_port(),
        stats_port=free_port(),
        fallback_port=free_port(),
        replica_ports=(first, first + 50),
    )
    environment["RAY_TMPDIR"] = str(folder / "ray")
    environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{dashboard}"
    environment["RAY_DASHBOARD_ADDRESS"] = f"http://127.0.0.1:{dashboard}"
    (folder / "ray").mkdir()
    options = {
        "node-ip-address": "127.0.0.1",
        "port": free_port(),
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": free_port(),
        "num-cpus": 8,
        "num-gpus": 0,
        "ray-client-server-port": free_port(),
    }
    with (folder / "ray.log").open("w") as log:
        process = subprocess.Popen(
            ["ray", "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items())],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in (folder / "ray.log").read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "ray.log").read_text())
            time.sleep(0.2)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        below = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(60)
        _, left = psutil.wait_procs(below, timeout=20)
        for each in left:
            each.kill()


def main(wanted: Sequence[str]) -> int:
    every = [page.relative_to(ROOT).as_posix() for page in PAGES]
    if unknown := sorted(set(wanted) - set(every)):
        print(f"no such page: {', '.join(unknown)}; pages are README.md, docs/jobs.md, ...", file=sys.stderr)
        return 2
    middle = [page for page in every if page not in (*_ORDER, *_LAST)]
    pages = [page for page in (*_ORDER, *middle, *_LAST) if not wanted or page in (*_FIRST, *wanted)]
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="gcd-"))
    try:
        environment = furnished(folder)
        with cluster(folder, environment) as dashboard:
            reader = Reader(folder / "work", environment, Placeholders(str(tiny_dir()), dashboard))
            with reader.served:
                for page in pages:
                    if page in _LAST:
                        for text in INLINE:
                            reader.run("in text", text)
                        reader.served.close()
                    reader.page(page)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _said(reader, all_pages=not wanted, minutes=(time.monotonic() - began) / 60)


def _said(reader: Reader, *, all_pages: bool, minutes: float) -> int:
    everything = list(commands())
    left_out = sum(each.why_not is not None for each in everything)
    print(
        f"{minutes:.0f} minutes; of {len(everything)} commands in blocks {reader.ran} run, {left_out} left out for a "
        f"reason; of {len(in_text())} in the midst of text {len(INLINE)} run, the others parsed only"
    )
    if all_pages and reader.ran + left_out != len(everything):
        reader.failed.append("a command was neither run nor left out")
    print("\n".join(reader.failed) or "all in order")
    return 1 if reader.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
