"""A process ends when the threads of its process groups rest, or after a while."""

import threading
import time

import pytest
from dmuon import exiting


@pytest.fixture
def state_of(tmp_path, monkeypatch):
    """Writes what Linux says of a thread; others are there that do not count."""
    monkeypatch.setattr(exiting, "_TASKS", tmp_path)

    def write(state, name="pt_gloo_runloop"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "stat").write_text(f"12 ({name}) {state} 1 1")

    write("R", "python (1) x")
    (tmp_path / "ended").mkdir()
    return write


def waited():
    start = time.monotonic()
    exiting.let_threads_rest(least_s=0, most_s=1.0)
    return time.monotonic() - start


def test_threads_that_rest_are_not_waited_for(state_of):
    state_of("S")
    assert waited() < 0.5


def test_a_thread_that_runs_gets_its_moment(state_of):
    state_of("R")
    threading.Timer(0.2, state_of, ["S"]).start()
    assert 0.15 < waited() < 0.9


def test_one_that_never_rests_holds_nobody(state_of):
    state_of("R")
    assert waited() >= 1.0
