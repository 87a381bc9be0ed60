"""Which reference a target is compared with, from the first draft on and over restarts."""

import json
from itertools import pairwise

import pytest
from specdec_exporter.drift import Fingerprint, Reference, configured
from specdec_exporter.model import DriftStatus
from specdec_exporter.uncertainty import Interval
from specdec_exporter.watch import MOST_FINGERPRINTS, DriftWatch

HOUR = 3600.0
DAY = 24 * HOUR
STEP = 60.0
GUIDE = (0.47, 0.24)
MODEL = Fingerprint("m", 2)


def learning() -> DriftWatch:
    return DriftWatch(13.0, 0.5, lambda fingerprint, t: None)


def with_guide() -> DriftWatch:
    def configure(fingerprint: Fingerprint, taken_at: float) -> Reference:
        return configured(fingerprint, GUIDE, taken_at=taken_at, variance_inflation=13.0)

    return DriftWatch(13.0, 0.5, configure)


def drafted(positions: tuple[float, ...] = GUIDE, drafts: float = 1200.0) -> Interval:
    return Interval(STEP, drafts, tuple(p * drafts for p in positions))


def fed(
    watch: DriftWatch,
    begin: float,
    end: float,
    positions: tuple[float, ...] = GUIDE,
    fingerprint: Fingerprint = MODEL,
) -> None:
    """A scrape a minute at 20 drafts a second, the first one minute after `begin`."""
    for i in range(round((end - begin) / STEP)):
        watch.add(begin + (i + 1) * STEP, fingerprint, drafted(positions))


def status(watch: DriftWatch) -> DriftStatus:
    (one,) = watch.statuses()
    return one


def again(watch: DriftWatch, other: DriftWatch) -> DriftWatch:
    """Another process that goes on from what this one saved."""
    small, large = watch.to_dict(learners=False), watch.to_dict(learners=True)
    other.restore(json.loads(json.dumps(small)), json.loads(json.dumps(large)))
    return other


def test_a_reference_is_in_force_from_four_hours_of_drafting_on_and_not_before() -> None:
    watch = learning()
    fed(watch, 0.0, 3.9 * HOUR)
    assert status(watch).score is None
    assert status(watch).learned_seconds == pytest.approx(3.9 * HOUR)
    assert status(watch).reference_position_acceptance_ratio == ()
    fed(watch, 3.9 * HOUR, 4.3 * HOUR)
    assert status(watch).reference_source == "learned"
    assert status(watch).reference_position_acceptance_ratio == pytest.approx(GUIDE)
    assert status(watch).score == 0.0


def test_idle_hours_do_not_count_as_learned() -> None:
    watch = learning()
    fed(watch, 0.0, 2 * HOUR)
    for i in range(600):
        watch.add(2 * HOUR + i * STEP, MODEL, Interval(STEP, 0.0, ()))
    fed(watch, 12 * HOUR, 13.5 * HOUR)
    assert status(watch).score is None


def test_the_reference_is_fitted_to_two_days_and_to_seven_and_never_again() -> None:
    watch = learning()
    taken = []
    for day in range(9):
        fed(watch, day * DAY, (day + 1) * DAY)
        taken.append(status(watch).reference_taken_at)
    first, *rest = [t for t in taken if t is not None]
    assert first == pytest.approx(4 * HOUR, abs=700)
    changes = [b for a, b in pairwise([first, *rest]) if b != a]
    assert changes == [pytest.approx(2 * DAY, abs=1300), pytest.approx(7 * DAY, abs=1300)]
    assert status(watch).learned_seconds is None


def test_a_slow_decline_that_has_begun_is_not_taken_for_normal_by_a_new_fit() -> None:
    watch = learning()
    fed(watch, 0.0, 3 * DAY)
    taken = status(watch).reference_taken_at
    for hour in range(72, 7 * 24 + 12):
        share = max(0.7, 1.0 - 0.004 * (hour - 72))
        fed(watch, hour * HOUR, (hour + 1) * HOUR, (0.47 * share, 0.24 * share))
    assert status(watch).reference_taken_at == taken
    assert status(watch).incident is not None


def test_a_configured_reference_is_in_force_at_once_and_nothing_is_learned() -> None:
    watch = with_guide()
    fed(watch, 0.0, 60.0)
    assert status(watch).reference_source == "configured"
    assert status(watch).learned_seconds is None
    fed(watch, 60.0, 2 * HOUR, (0.2, 0.05))
    assert status(watch).score is not None
    assert status(watch).score >= 1  # type: ignore[operator]


def test_an_incident_stays_until_it_is_acknowledged() -> None:
    watch = with_guide()
    fed(watch, 0.0, 2 * HOUR, (0.2, 0.05))
    fed(watch, 2 * HOUR, 12 * HOUR)
    incident = status(watch).incident
    assert incident is not None
    assert incident.since < incident.detected_at < 2 * HOUR
    assert not watch.acknowledge("another")
    assert watch.acknowledge("m")
    assert status(watch).incident is None
    assert not watch.acknowledge("m")


@pytest.mark.parametrize(
    "other",
    [
        Fingerprint("m", 3),
        Fingerprint("m", 2, engine_version="0.33.0"),
        Fingerprint("m", 2, revision="b"),
    ],
)
def test_another_fingerprint_has_a_reference_of_its_own_and_the_first_is_kept_for_its_return(
    other: Fingerprint,
) -> None:
    watch = learning()
    fed(watch, 0.0, 5 * HOUR)
    known = status(watch)
    watch.add(5 * HOUR + STEP, other, drafted((0.3, 0.1, 0.0)[: other.num_speculative_tokens]))
    assert status(watch).score is None
    assert status(watch).engine_version == other.engine_version
    watch.add(5 * HOUR + 2 * STEP, MODEL, drafted())
    assert status(watch).reference_taken_at == known.reference_taken_at


def test_without_speculation_nothing_is_watched() -> None:
    watch = learning()
    fed(watch, 0.0, HOUR)
    watch.add(HOUR + STEP, Fingerprint("m", 0), Interval(STEP, 0.0, ()))
    assert watch.statuses() == ()


def test_only_so_many_fingerprints_are_remembered_and_the_current_one_always() -> None:
    watch = learning()
    for i in range(3 * MOST_FINGERPRINTS):
        watch.add(i * STEP, Fingerprint("m", 2, revision=str(i)), drafted())
    assert len(watch.to_dict(learners=False)["watched"]) == MOST_FINGERPRINTS
    assert status(watch).revision == str(3 * MOST_FINGERPRINTS - 1)


def test_a_restart_loses_neither_reference_nor_learning_nor_incident() -> None:
    watch = learning()
    fed(watch, 0.0, 3 * HOUR)
    watch = again(watch, learning())
    fed(watch, 3 * HOUR, 4.3 * HOUR)
    before = status(watch)
    assert before.reference_source == "learned"
    watch = again(watch, learning())
    fed(watch, 4.3 * HOUR, 4.4 * HOUR)
    assert status(watch).reference_taken_at == before.reference_taken_at
    fed(watch, 4.4 * HOUR, 8 * HOUR, (0.2, 0.05))
    found = status(watch).incident
    assert found is not None
    watch = again(watch, learning())
    fed(watch, 8 * HOUR, 8.1 * HOUR)
    assert status(watch).incident == found


def test_a_reference_that_is_configured_anew_takes_the_place_of_a_learned_one_and_the_reverse() -> (
    None
):
    watch = learning()
    fed(watch, 0.0, 5 * HOUR)
    watch = again(watch, with_guide())
    fed(watch, 5 * HOUR, 5.1 * HOUR)
    assert status(watch).reference_source == "configured"
    watch = again(watch, learning())
    fed(watch, 5.1 * HOUR, 5.2 * HOUR)
    assert status(watch).reference_source is None


def test_a_reference_is_replaced_on_request() -> None:
    watch = learning()
    fed(watch, 0.0, 5 * HOUR)
    assert not watch.relearn("another")
    assert watch.relearn("m")
    fed(watch, 5 * HOUR, 6 * HOUR, (0.3, 0.1))
    assert status(watch).score is None
    fed(watch, 6 * HOUR, 9.5 * HOUR, (0.3, 0.1))
    assert status(watch).reference_position_acceptance_ratio == pytest.approx((0.3, 0.1))


def test_a_model_that_the_target_no_longer_has_is_not_shown_and_comes_back_as_it_was() -> None:
    watch = with_guide()
    fed(watch, 0.0, HOUR, (0.40, 0.20))
    score = status(watch).score
    watch.keep({"another"})
    assert watch.statuses() == ()
    assert not watch.acknowledge("m")
    watch.add(HOUR, MODEL, Interval(STEP, 0.0, ()))
    assert status(watch).score == score
