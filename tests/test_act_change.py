"""The state of a change says after every record what is done, what may be, and what comes next."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.act.change import MOST_RESUMPTIONS, Change, Phase, Progress, Step

CHANGE = Change("c-1", "t", "m", 2, 1, "position decay", 1e9)
FORWARD = [Step.WRITE, Step.RESTART, Step.READY, Step.VERIFY]


def after(
    steps: int, *, applies_itself: bool = False, progress: Progress | None = None
) -> Progress:
    """A progress so many steps further."""
    progress = progress or Progress(CHANGE)
    for _ in range(steps):
        progress = progress.begin(applies_itself=applies_itself).done()
    return progress


def test_a_change_goes_through_its_steps_to_the_new_k() -> None:
    assert [after(n).next_step for n in range(4)] == FORWARD
    phases = [after(n).phase for n in range(5)]
    assert phases == ["planned", "written", "restarted", "ready", "verified"]
    assert after(4).ended
    assert after(4).next_step is None
    assert after(4).k_in_force == 1


def test_the_way_back_goes_through_the_same_steps_to_the_old_k_and_is_not_verified() -> None:
    back = after(3).undo("slower")
    assert back.wanted_k == 2
    assert [after(n, progress=back).next_step for n in range(4)] == [*FORWARD[:3], None]
    end = after(3, progress=back)
    assert (end.phase, end.k_in_force, end.problem) == (Phase.ROLLED_BACK, 2, "slower")


@pytest.mark.parametrize("number", range(4))
def test_a_step_that_fails_turns_the_change_back(number: int) -> None:
    failed = after(number).begin(applies_itself=False).failed("why", output="tail")
    assert (failed.undoing, failed.next_step) == (True, Step.WRITE)
    assert (failed.problem, failed.output) == ("why", "tail")
    assert failed.k_in_force is None


def test_what_could_not_be_written_is_a_failure_that_changed_nothing() -> None:
    failed = Progress(CHANGE).begin(applies_itself=False).failed("refused", untouched=True)
    assert (failed.phase, failed.undoing, failed.problem) == (Phase.FAILED, False, "refused")


def test_a_failure_on_the_way_back_needs_somebody_to_look() -> None:
    back = after(3).undo("slower").begin(applies_itself=False).failed("read-only", untouched=True)
    assert (back.phase, back.k_in_force) == (Phase.FAILED, None)
    assert back.problem == "slower; and the way back failed: read-only"


def test_a_restart_that_could_not_be_begun_did_not_disturb_the_server() -> None:
    begun = after(1).begin(applies_itself=False)
    assert begun.failed("no such command", untouched=True).disturbed is False
    assert begun.failed("status 1").disturbed is True
    assert after(1).disturbed is False


def test_a_k_that_is_taken_up_by_itself_disturbs_the_server_when_it_is_written() -> None:
    assert Progress(CHANGE).begin(applies_itself=True).disturbed


def test_what_was_not_begun_is_dropped_by_the_next_process() -> None:
    resumed = Progress(CHANGE).resume()
    assert (resumed.phase, resumed.k_in_force) == (Phase.ROLLED_BACK, 2)


@pytest.mark.parametrize(
    "left", [Progress(CHANGE).begin(applies_itself=False), after(1)], ids=["begun", "written"]
)
def test_what_did_not_reach_the_server_is_undone_by_the_next_process(left: Progress) -> None:
    resumed = left.resume()
    assert (resumed.undoing, resumed.next_step, resumed.disturbed) == (True, Step.WRITE, False)


@pytest.mark.parametrize("number", range(1, 4))
@pytest.mark.parametrize("begun", [True, False])
def test_what_may_have_reached_the_server_goes_on_where_it_was(number: int, begun: bool) -> None:
    left = after(number).begin(applies_itself=False) if begun else after(number)
    if not left.disturbed:
        return
    resumed = left.resume()
    assert (resumed.undoing, resumed.next_step) == (False, FORWARD[number])


def test_a_webhook_that_may_have_been_called_is_called_again_by_the_next_process() -> None:
    resumed = Progress(CHANGE).begin(applies_itself=True).resume()
    assert (resumed.undoing, resumed.next_step) == (False, Step.WRITE)
    refused = resumed.begin(applies_itself=True).failed("status 409", untouched=True)
    assert (refused.undoing, refused.phase) == (True, Phase.PLANNED)


def test_a_way_back_goes_on_as_a_way_back() -> None:
    left = after(1, progress=after(2).undo("slower"))
    assert left.resume().undoing
    assert left.resume().next_step is Step.RESTART


def test_a_change_that_outlives_too_many_processes_is_undone_and_then_given_up() -> None:
    progress = after(2)
    for _ in range(MOST_RESUMPTIONS):
        progress = progress.resume()
        assert not progress.undoing
    for _ in range(MOST_RESUMPTIONS):
        progress = progress.resume()
        assert progress.undoing
        assert not progress.ended
    progress = progress.resume()
    assert (progress.phase, progress.k_in_force) == (Phase.FAILED, None)
    assert "7 processes ended on the way" in progress.problem


def test_an_end_is_an_end() -> None:
    for end in (after(4), after(3, progress=after(1).undo("x"))):
        assert end.resume() == end


def test_the_way_back_has_a_key_of_its_own() -> None:
    back = CHANGE.reversed("slower")
    assert (back.key, back.from_k, back.to_k, back.reason) == ("c-1-undo", 1, 2, "slower")
    assert (back.target, back.time) == (CHANGE.target, CHANGE.time)


@pytest.mark.parametrize(("from_k", "to_k"), [(2, 2), (-1, 2), (2, -1)])
def test_no_change_is_no_change(from_k: int, to_k: int) -> None:
    with pytest.raises(ValueError, match="no change"):
        Change("c", "t", "m", from_k, to_k, "", 0.0)


moves = st.lists(st.sampled_from(["done", "failed", "refused", "resume"]), max_size=40)


@given(moves, st.booleans())
def test_whatever_happens_a_change_ends_and_its_record_says_the_same(
    happens: list[str], applies_itself: bool
) -> None:
    progress = Progress(CHANGE)
    for move in [*happens, *["done"] * 8]:
        saved = json.loads(json.dumps(progress.to_dict()))
        assert Progress.from_dict(saved) == progress
        if progress.ended:
            break
        if move == "resume":
            progress = progress.resume()
        else:
            begun = progress.begin(applies_itself=applies_itself)
            failing = {"untouched": move == "refused"}
            progress = begun.done() if move == "done" else begun.failed("why", **failing)
    assert progress.ended
    if progress.phase is Phase.VERIFIED:
        assert progress.k_in_force == 1
        assert not progress.undoing
    else:
        assert progress.k_in_force in (2, None)


def test_a_record_of_another_form_is_an_error() -> None:
    for saved in ({}, {**Progress(CHANGE).to_dict(), "phase": "lost"}):
        with pytest.raises((KeyError, ValueError)):
            Progress.from_dict(saved)
