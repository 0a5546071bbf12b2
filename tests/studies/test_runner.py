"""The runner of all studies: order, budget, failures of single tasks, interruption, one process per folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import another_process

from offbeat.errors import FolderTaken, Interrupted, NotFinite, UserError
from offbeat.runs import lock
from offbeat.studies import runner as runners
from offbeat.studies.runner import Failure, StudyRunner


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(runners.time, "monotonic", lambda: now[0])
    return now


def test_a_task_that_fails_is_recorded_and_the_others_run(tmp_path):
    done, failed = [], {}

    def work(task: int) -> None:
        if task == 2:
            raise ZeroDivisionError("of all things\nand more")
        if task == 3:
            raise UserError("not this one")
        done.append(task)

    StudyRunner(tmp_path, show=False).run(range(5), work, failed=failed.__setitem__)
    assert done == [0, 1, 4]
    assert failed[3] == Failure("not this one")
    assert failed[2].reason == "ZeroDivisionError: of all things"
    assert "in work" in failed[2].traceback
    assert Failure.of(NotFinite("the loss is nan")).diverged


@pytest.mark.parametrize("error", [Interrupted("stop"), FolderTaken("in use"), KeyboardInterrupt()])
def test_an_interruption_and_a_folder_in_use_end_the_study(tmp_path, error):
    def work(task: int) -> None:
        raise error

    with pytest.raises(type(error)):
        StudyRunner(tmp_path, show=False).run([1, 2], work, failed=lambda task, failure: pytest.fail("recorded"))


def test_errors_that_are_not_of_a_task_end_the_study(tmp_path):
    def work(task: int) -> None:
        raise UserError("of all")

    with pytest.raises(UserError):
        StudyRunner(tmp_path, show=False).run([1], work)
    with pytest.raises(UserError):
        StudyRunner(tmp_path, show=False).run([1], work, failed=lambda *_: None, errors=ZeroDivisionError)


@pytest.mark.parametrize(("resumable", "expected"), [(False, [0, 1, 2]), (True, [0, 1, 2, 3])])
def test_a_task_starts_if_one_like_the_last_would_end_within_the_budget(tmp_path, clock, resumable, expected):
    done, late = [], []

    def work(task: int) -> None:
        clock[0] += 17
        done.append(task)

    runner = StudyRunner(tmp_path, minutes=1, show=False)
    runner.run(range(5), work, late=late.append, resumable=resumable)
    assert done == expected
    assert late == [task for task in range(5) if task not in expected]


def test_the_least_number_of_tasks_is_done_without_time_left(tmp_path, clock):
    done, late = [], []
    runner = StudyRunner(tmp_path, minutes=1, show=False)
    clock[0] += 61
    runner.run(range(4), done.append, late=late.append, least=2)
    assert (done, late) == ([0, 1], [2, 3])


def test_ctrl_c_writes_what_there_is_and_states_how_to_continue(tmp_path):
    runner = StudyRunner(tmp_path / "x", show=False)

    def finish() -> None:
        runner.write("found.json", {"points": 3})

    again = "stopped by Ctrl-C; repeat the command with out='x' to continue in"
    with pytest.raises(Interrupted, match=again), runner.opened(finish, arguments=" with out='x'"):
        raise KeyboardInterrupt
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["found.json"]


def test_a_folder_serves_one_study_at_a_time(tmp_path):
    study = StudyRunner(tmp_path, show=False).opened(lambda: pytest.fail("it is not ours to write to"))
    with another_process(tmp_path) as other, pytest.raises(FolderTaken, match=f"process {other.pid}"), study:
        pytest.fail("opened")
    assert [path.name for path in tmp_path.iterdir()] == [lock.FILE]


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="give another folder as out="):
        StudyRunner(Path(tmp_path / "file")).write("record.json", {})


def test_progress_has_the_seconds_so_far_and_can_be_silent(tmp_path, clock, capsys):
    runner = StudyRunner(tmp_path)
    clock[0] += 12
    runner.report("one task")
    StudyRunner(tmp_path, show=False).report("nothing")
    assert capsys.readouterr().err == "[  12 s] one task\n"
