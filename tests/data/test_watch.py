"""Deaths are charged to what the process that died was at."""

from __future__ import annotations

from gym_capture.data.watch import Watch


def test_a_death_is_charged_to_what_was_under_way_and_to_nothing_before_it() -> None:
    watch = Watch()
    assert [watch.enter("t", "p1", what) for what in ("part", "a", "b")] == [0, 0, 0]
    assert [watch.enter("t", "p2", what) for what in ("part", "a", "b")] == [0, 0, 1]
    assert [watch.enter("t", "p3", what) for what in ("part", "a", "b")] == [0, 0, 2]


def test_a_process_that_was_through_with_its_task_died_of_nothing() -> None:
    watch = Watch()
    watch.enter("t", "p1", "a")
    watch.leave("t", "p1")
    assert watch.enter("t", "p2", "a") == 0  # the task runs again because its answer was lost


def test_tasks_that_run_side_by_side_are_no_deaths() -> None:
    watch = Watch()
    assert watch.enter("t1", "p1", "a") == 0
    assert watch.enter("t2", "p2", "a") == 0
    assert watch.enter("t1", "p1", "b") == 0
    assert watch.enter("t3", "p3", "a") == 0
