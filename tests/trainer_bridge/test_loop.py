"""A training run: killed anywhere it goes on to the same end; its folder is whole at all times."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from gym_capture.errors import ConfigError, StreamLostError
from trainer_bridge import checkpoints
from trainer_bridge.batching import Selection
from trainer_bridge.checkpoints import Progress
from trainer_bridge.group_sources import ParquetGroups
from trainer_bridge.groups import GroupStream, Position
from trainer_bridge.grpo import GrpoOptions, GrpoTrainer, StepMetrics
from trainer_bridge.loop import LoopOptions, Trainer, groups_of, lags
from trainer_bridge.plots import write_plots
from trainer_bridge.stream import TrainRollout

from .made import model, rollout, sequence
from .test_stream import row, table

OPTIONS = GrpoOptions(lr=1e-2)
GROUPS = [
    [rollout(sequence(seed=10 * group + n), group_id=f"g{group}", advantage=a) for n, a in enumerate((1.0, -1.0))]
    for group in range(6)
]


class Killed(BaseException):
    """As a signal would."""


def trainer(run: Path, options: GrpoOptions = OPTIONS, **loop: Any) -> Trainer:
    loop = {"rollouts_per_step": 2, "checkpoint_every": 2, "keep": 2, "plots": False} | loop
    return Trainer(GrpoTrainer(model(), options), run, LoopOptions(**loop))


def weights(made: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in made.grpo.model.parameters()])


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_metrics_plots_and_a_model_that_can_be_served(tmp_path: Path) -> None:
    seen: list[int] = []
    made = trainer(tmp_path, plots=True)
    progress = made.run(GROUPS, on_step=lambda progress, metrics: seen.append(progress.step))
    assert (progress, seen) == (Progress(step=6, groups_trained=6), [1, 2, 3, 4, 5, 6])
    found = lines(tmp_path)
    assert [line["step"] for line in found] == seen
    assert {"loss", "gen_kl_error", "token_mult_prob_error", "clip_fraction", "entropy"} <= found[0].keys()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    loaded = GrpoTrainer.load(tmp_path / "checkpoints" / "step-00000006", OPTIONS)
    saved = torch.cat([parameter.detach().flatten() for parameter in loaded.model.parameters()])
    assert torch.equal(saved, weights(made))


@pytest.mark.parametrize("killed_behind", [1, 3])
def test_a_run_that_was_killed_goes_on_to_the_same_end(tmp_path: Path, killed_behind: int) -> None:
    whole = trainer(tmp_path / "whole")
    whole.run(GROUPS)

    def kill(progress: Progress, metrics: StepMetrics) -> None:
        if progress.step == killed_behind:
            raise Killed

    run = tmp_path / "killed"
    with pytest.raises(Killed):
        trainer(run).run(GROUPS, on_step=kill)
    again = trainer(run)
    assert again.resume() == (killed_behind > 1)
    assert again.progress.step == again.progress.groups_trained == {1: 0, 3: 2}[killed_behind]
    again.run(itertools.islice(GROUPS, again.progress.groups_trained, None))
    assert torch.equal(weights(again), weights(whole))
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5, 6]
    losses = [[line["loss"] for line in lines(folder)] for folder in (run, tmp_path / "whole")]
    assert losses[0] == losses[1]


def test_what_a_kill_in_a_write_leaves_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer(tmp_path)
    first.run(GROUPS[:2])
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="No space left"):
        first.run(GROUPS[2:4])
    monkeypatch.undo()
    (tmp_path / "checkpoints" / ".partial-killed").mkdir()
    again = trainer(tmp_path)
    assert again.resume()
    assert again.progress == Progress(step=2, groups_trained=2)
    again.run(GROUPS[2:4])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(folder: Path, **_: object) -> None:
        (folder / "state.json").unlink()
        raise Killed

    monkeypatch.setattr(checkpoints.shutil, "rmtree", kill)
    with pytest.raises(Killed):
        trainer(tmp_path, keep=1).run(GROUPS)
    monkeypatch.undo()
    folders = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [(each.name, (each / "state.json").exists()) for each in folders] == [("step-00000004", True)]
    again = trainer(tmp_path, keep=1)
    assert again.resume()
    again.run(GROUPS[4:])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]


def test_a_run_in_a_used_folder_that_does_not_resume_is_refused_before_it_trains(tmp_path: Path) -> None:
    trainer(tmp_path).run(GROUPS)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    metrics = (tmp_path / "metrics.jsonl").read_text()
    other = trainer(tmp_path)
    before = weights(other)
    with pytest.raises(
        ConfigError, match=r"step-00000006 is ahead of this run.*step 0: resume.*or take another folder"
    ):
        other.run(GROUPS)
    assert torch.equal(weights(other), before)
    with pytest.raises(ConfigError, match="step-00000006 is ahead of this run"):
        checkpoints.write(tmp_path / "checkpoints", other.grpo, Progress(step=5))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names
    assert (tmp_path / "metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize("name", ["keep", "checkpoint_every", "rollouts_per_step"])
def test_options_of_a_loop_that_make_no_sense_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1: got 0"):
        trainer(tmp_path, **{name: 0})


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep must be at least 1: got 0"):
        checkpoints.write(tmp_path, GrpoTrainer(model(), OPTIONS), Progress(step=1), keep=0)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_model_is_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    trainer(tmp_path).run(GROUPS[:2])
    other = trainer(tmp_path)
    other.grpo.model.lm_head = torch.nn.Linear(32, 50, bias=False)
    before = weights(other)
    with pytest.raises(ConfigError, match=r"another model.*lm_head.weight as \[97, 32\], this model as \[50, 32\]"):
        other.resume()
    assert torch.equal(weights(other), before)
    assert other.progress == Progress()


def test_a_run_on_a_stream_goes_on_at_the_position_of_its_checkpoint(tmp_path: Path) -> None:
    """Killed between two checkpoints: groups behind the first one come again, and their records were still there."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(6):
        rows = [row(f"{number}.{n}", group_id=f"g{number}", advantage=a) for n, a in enumerate((1.0, -1.0))]
        pq.write_table(table(*rows), data / f"part-{number:05d}.parquet")
    acknowledged: list[list[str]] = []

    class Noted(ParquetGroups):
        async def retire(self, consumed: Any) -> tuple[str, ...]:
            acknowledged.append(sorted(checkpoint_position(tmp_path / "run").settled))
            return ()

    def kill(progress: Progress, metrics: StepMetrics) -> None:
        if progress.step == 3:
            raise Killed

    whole, made = trainer(tmp_path / "whole"), trainer(tmp_path / "run")
    with GroupStream(Noted(data)) as stream, pytest.raises(Killed):
        made.run_stream(stream, on_step=kill)
    assert acknowledged == [["g0", "g1"]]  # what a checkpoint on disk had by then
    again = trainer(tmp_path / "run")
    assert again.resume()
    with GroupStream(Noted(data), position=again.position) as stream:
        again.run_stream(stream)
    assert again.position == Position(frozenset(f"g{number}" for number in range(6)))
    with GroupStream(Noted(data)) as stream:
        whole.run(stream)
    assert torch.equal(weights(again), weights(whole))
    assert [line.keys() & {"position"} for line in lines(tmp_path / "run")] == [set()] * 6


@pytest.mark.parametrize("updates", [1, 2])
def test_a_run_that_is_told_to_stop_gives_up_what_has_not_moved_the_weights(tmp_path: Path, updates: int) -> None:
    """Within the second step: in its first pass it is given up, behind an update it is finished."""
    options = replace(OPTIONS, updates_per_step=updates, tokens_per_micro_batch=1)
    made = trainer(tmp_path / "run", options, checkpoint_every=100)
    passes = {1: 1, 2: 2 + 2 + 1}[updates]  # the first pass; that of `prev`, an update, and one pass of the next one

    def stop(done: int, of: int) -> None:
        assert of == {1: 2, 2: 6}[updates]
        if made.progress.step == 1 and done == passes:
            made.stop()

    made.run(GROUPS, on_progress=stop)
    steps = {1: 1, 2: 2}[updates]
    again = trainer(tmp_path / "run", options)
    again.resume()
    assert again.progress == Progress(step=steps, groups_trained=steps)
    whole = trainer(tmp_path / "whole", options, steps=steps)
    whole.run(GROUPS)
    assert torch.equal(weights(again), weights(whole))
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, steps + 1))


def test_a_run_that_waits_for_a_group_can_be_stopped(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run")
    with GroupStream(ParquetGroups(tmp_path / "nothing", follow=True)) as stream:
        progress = made.run_stream(stream, on_wait=lambda there, of: made.stop())
    assert progress == Progress()


def test_a_stream_that_breaks_leaves_a_checkpoint_of_what_was_trained(tmp_path: Path) -> None:
    def breaking() -> Iterator[list[TrainRollout]]:
        yield from GROUPS[:3]
        raise StreamLostError("the graph is gone")

    made = trainer(tmp_path, checkpoint_every=100)
    with pytest.raises(StreamLostError):
        made.run(breaking())
    again = trainer(tmp_path)
    again.resume()
    assert again.progress.step == 3


def test_how_old_groups_are_is_counted_by_their_oldest_weights(tmp_path: Path) -> None:
    def sampled(version: str | None, *, masked: bool = False) -> TrainRollout:
        made = rollout(sequence(seed=1))
        (one,) = made.sequences
        spans = tuple(replace(span, weight_version=version) for span in one.spans)
        assert spans
        return replace(made, sequences=(replace(one, spans=spans),), masked=masked)

    groups = [[sampled("7"), sampled("5")], [sampled("8"), sampled("1", masked=True)], [sampled(None)]]
    assert lags(groups, 8) == {"version": 8, "lag_mean": 1.5, "lag_max": 3, "groups_of_unknown_age": 1}
    assert lags(groups, None) == {"version": None, "lag_mean": None, "lag_max": None, "groups_of_unknown_age": 1}


def checkpoint_position(run: Path) -> Position:
    newest = checkpoints.latest(run / "checkpoints")
    assert newest is not None
    return Position.from_json(json.loads((newest / "state.json").read_text())["progress"]["position"])


@pytest.mark.parametrize("damage", ["state.json", "optimizer.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, damage: str) -> None:
    trainer(tmp_path).run(GROUPS[:2])
    file = tmp_path / "checkpoints" / "step-00000002" / damage
    file.write_bytes(file.read_bytes()[:50])
    again = trainer(tmp_path)
    before = weights(again)
    with pytest.raises(ConfigError, match="no checkpoint that can be read"):
        again.resume()
    assert torch.equal(weights(again), before)


def _of_another_model(saved: dict[str, Any]) -> None:
    moments = saved["optimizer"]["state"]
    moments[0], moments[1] = moments[1], moments[0]


def _of_fewer_parameters(saved: dict[str, Any]) -> None:
    saved["optimizer"]["state"].popitem()
    saved["optimizer"]["param_groups"][0]["params"].pop()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_of_another_model, r"another model: its optimizer.pt has parameter \S+ as \[\d.*\], this model as \[\d.*\]"),
        (_of_fewer_parameters, r"another model: its optimizer.pt is of \d+ parameters, this model has \d+"),
        (lambda saved: saved["optimizer"]["state"][0].pop("exp_avg"), "no checkpoint that can be read: 'exp_avg'"),
        (lambda saved: saved.pop("rng"), "no checkpoint that can be read: 'rng'"),
        (lambda saved: saved.pop("cuda_rng"), "no checkpoint that can be read: 'cuda_rng'"),
        (lambda saved: saved.update(rng=torch.zeros(3)), "no checkpoint that can be read"),
    ],
    ids=["shapes", "number", "no moments", "no rng", "no cuda_rng", "another rng"],
)
def test_another_optimizer_file_is_refused_by_name_and_nothing_changes(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    trainer(tmp_path).run(GROUPS[:2])
    folder = tmp_path / "checkpoints" / "step-00000002"
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    change(saved)
    torch.save(saved, folder / "optimizer.pt")
    again = trainer(tmp_path)
    before, draws = weights(again), torch.get_rng_state()
    with pytest.raises(ConfigError, match=f"{folder} is (of )?{says}"):
        again.resume()
    assert torch.equal(weights(again), before)
    assert torch.equal(torch.get_rng_state(), draws)
    assert (again.progress, dict(again.grpo.optimizer.state)) == (Progress(), {})


def test_a_state_file_of_something_else_is_one_line(tmp_path: Path) -> None:
    trainer(tmp_path).run(GROUPS[:2])
    path = tmp_path / "checkpoints" / "step-00000002" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parameters": ["lm_head.weight"]}))
    with pytest.raises(ConfigError, match="step-00000002 is no checkpoint that can be read"):
        trainer(tmp_path).resume()


def test_random_draws_go_on_where_they_were(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        trainer(tmp_path).run(GROUPS[:2])
        expected = torch.rand(3)
        torch.manual_seed(99)
        trainer(tmp_path).resume()
        assert torch.equal(torch.rand(3), expected)


def test_options_of_today_hold_when_a_run_goes_on(tmp_path: Path) -> None:
    trainer(tmp_path).run(GROUPS[:2])
    again = trainer(tmp_path, GrpoOptions(lr=1e-3, weight_decay=0.5))
    again.resume()
    assert [(group["lr"], group["weight_decay"]) for group in again.grpo.optimizer.param_groups] == [(1e-3, 0.5)]


def test_the_learning_rate_warms_up_over_a_run_that_is_resumed(tmp_path: Path) -> None:
    trainer(tmp_path, warmup_steps=4, steps=2).run(GROUPS)
    again = trainer(tmp_path, warmup_steps=4)
    assert again.resume()
    again.run(itertools.islice(GROUPS, again.progress.groups_trained, None))
    assert [line["lr"] for line in lines(tmp_path)] == [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]
    assert {group["lr"] for group in again.grpo.optimizer.param_groups} == {0.01}


def test_a_step_takes_whole_groups_and_no_more_than_it_trains_on(tmp_path: Path) -> None:
    stream = iter(GROUPS)
    made = trainer(tmp_path, rollouts_per_step=3, steps=2)
    assert made.run(stream) == Progress(step=2, groups_trained=4)
    assert len(list(stream)) == 2


def test_what_is_not_finite_is_null_in_a_line(tmp_path: Path) -> None:
    wrong: list[list[TrainRollout]] = [[rollout(sequence(), advantage=float("inf"))]]
    trainer(tmp_path).run(wrong)
    (line,) = lines(tmp_path)
    assert (line["updates"], line["grad_norm"]) == (0, None)


def test_a_cut_line_of_metrics_is_left_out_and_other_files_are_refused(tmp_path: Path) -> None:
    trainer(tmp_path).run(GROUPS[:2])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "lo')
    trainer(tmp_path).resume()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    for other in (b"no json\n", b"7\n", b'["step"]\n', b'{"step": "2"}\n', b"\xff\n"):
        path.write_bytes(other)
        again = trainer(tmp_path)
        before = weights(again)
        with pytest.raises(ConfigError, match="of something else"):
            again.resume()
        assert torch.equal(weights(again), before)
        assert path.read_bytes() == other


def test_plots_need_something_to_draw(tmp_path: Path) -> None:
    assert not write_plots([{"step": 1, "loss": None}], tmp_path / "none.png")
    assert write_plots([{"step": 1, "loss": 1.0}, {"step": 2, "loss": float("nan")}], tmp_path / "one.png")
    width, height = struct.unpack(">II", (tmp_path / "one.png").read_bytes()[16:24])
    assert min(width, height) > 100


def test_groups_are_whole() -> None:
    flat = [each for group in GROUPS for each in group]
    assert [len(group) for group in groups_of(flat)] == [2] * 6


def test_the_newest_checkpoint_is_that_of_the_most_steps(tmp_path: Path) -> None:
    made = GrpoTrainer(model(), GrpoOptions(selection=Selection()))
    folder = checkpoints.write(tmp_path, made, Progress(step=99_999_999), keep=5)
    shutil.copytree(folder, tmp_path / "step-100000000")
    assert checkpoints.latest(tmp_path) == tmp_path / "step-100000000"
    assert checkpoints.latest(tmp_path / "nothing") is None
