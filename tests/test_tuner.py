"""The tuner on one target: what it decides it writes down, carries out, verifies and takes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.act.settings import ActuatorSettings
from specdec_exporter.config import Target
from specdec_exporter.cost import Acceptance
from specdec_exporter.decide import Evidence
from specdec_exporter.store import Store
from specdec_exporter.tuner import Refusal, Tuner
from specdec_exporter.tuner_settings import TunerSettings
from structlog.testing import capture_logs

from tests import pages
from tests.hostile import Exchange, HostileServer, response

COLLAPSED = (0.47, 0.10, 0.04, 0.02)
QUICK = TunerSettings(
    mode="apply",
    settle=1.0,
    cooldown=0.0,
    min_drafts=1.0,
    verify_timeout=3600.0,
    ready_timeout=60.0,
)
DECAY = {"position_decay": "firing"}


def evidence(
    k: int, start: float, tpot: float = 0.005, verdicts: dict[str, str] = DECAY
) -> Evidence:
    seen = Acceptance(COLLAPSED[:k], (0.002,) * k, 50_000.0)
    length = 1 + sum(COLLAPSED[:k])
    return Evidence(
        observed_k=k,
        server_start=start,
        verdicts=verdicts if k > 1 else {},
        hour=seen,
        window=seen,
        load=((8.0, 1e6),),
        decode_concurrency=8.0,
        step_seconds=tpot * length,
        tokens_per_step=length,
        decode_throughput=8.0 / tpot,
    )


class Bench:
    """A file with k, a server that serves the k of the file, and a tuner on both."""

    def __init__(self, folder: Path, server: HostileServer, settings: TunerSettings) -> None:
        self.file = folder / "vllm.yaml"
        self.store = Store(folder / "state.db")
        actuator = ActuatorSettings(
            kind="vllm-config",
            file=self.file,
            restart=("true",),
            ready_timeout=10.0,
        )
        self.target = Target(name="m", url=server.url, actuator=actuator)
        self.now = 1000.0
        self.tuner = self.new_tuner(settings)

    def new_tuner(self, settings: TunerSettings) -> Tuner:
        return Tuner(self.target, settings, self.store, clock=lambda: self.now)

    @property
    def k(self) -> int:
        line = next(x for x in self.file.read_text().splitlines() if "spec-tokens" in x)
        return int(line.partition(":")[2])

    async def look(self, seen: Evidence, seconds: float = 15.0) -> None:
        """One evaluation, and time for what it has begun."""
        self.now += seconds
        self.tuner.evaluate({"m": seen}, self.now, {})
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.story())

    def phase(self) -> str:
        saved = self.store.get("changes", "m")
        return "" if saved is None else str(saved["phase"])

    def story(self) -> list[str]:
        return [f"{e['what']} {e.get('outcome', '')}".strip() for e in self.audit()]

    def audit(self) -> list[dict[str, Any]]:
        return self.store.logged("audit")[::-1]


@contextlib.asynccontextmanager
async def bench(folder: Path, settings: TunerSettings = QUICK) -> AsyncIterator[Bench]:
    (folder / "vllm.yaml").write_text(
        "model: target  # kept\nspec-method: draft_model\nspec-tokens: 4\n"
    )

    def serve(exchange: Exchange) -> None:
        text = (folder / "vllm.yaml").read_text()
        k = int(text.partition("spec-tokens:")[2].split()[0])
        per_position = tuple(1000 * p for p in COLLAPSED[:k])
        exchange.send(response(pages.page(pages.counters(1000, per_position))))

    with HostileServer(serve) as server:
        made = Bench(folder, server, settings)
        try:
            yield made
        finally:
            await made.tuner.stop()
            made.store.close()


async def begun(made: Bench) -> None:
    """A server at k = 4 whose second position has collapsed, and the change to 1 that follows."""
    await made.look(evidence(4, 1.0))
    await made.look(evidence(4, 1.0))
    await made.until(lambda: made.phase() == "ready")
    assert made.k == 1


def test_what_the_last_position_gains_is_shown_once_both_step_times_are_measured() -> None:
    tuner = Tuner(Target(name="m", url="http://127.0.0.1:1"), QUICK, Store(None), clock=lambda: 0.0)
    shown = []
    for i, k in enumerate((2,) * 40 + (1,) * 40 + (2,) * 40):
        tuner.evaluate({"m": evidence(k, float(k), tpot=0.004 + 0.001 * k)}, 15.0 * i, {})
        (status,) = tuner.statuses()
        shown.append(status.last_position_gain_ratio)
        assert (status.last_position_gain_ratio_stderr is None) == (shown[-1] is None)
    assert set(shown[:80]) == {None}
    # A TPOT of 6 ms where it was 5 ms.
    assert shown[-1] == pytest.approx(5 / 6 - 1, abs=0.03)


def test_a_collapse_shrinks_k_to_1_which_is_verified_and_written_down(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            await begun(made)
            (status,) = made.tuner.statuses()
            assert (status.phase, status.observed_k) == ("ready", 4)
            await made.look(evidence(1, 2.0, tpot=0.004))
            await made.look(evidence(1, 2.0, tpot=0.004))
            await made.until(lambda: made.phase() == "verified")
            await made.until(lambda: "ended verified" in made.story())
            assert made.k == 1
            assert "# kept" in made.file.read_text()
            (status,) = made.tuner.statuses()
            assert (status.actuations, status.rollbacks, status.phase) == (1, 0, None)
            begin = next(e for e in made.audit() if e["what"] == "begun")
            assert (begin["from_k"], begin["to_k"]) == (4, 1)
            assert "position 1" in begin["reason"]
            assert begin["evidence"]["position_acceptance_ratio"] == list(COLLAPSED)

    asyncio.run(run())


def test_a_change_that_makes_it_worse_is_taken_back_and_not_tried_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            await begun(made)
            for _ in range(2):
                await made.look(evidence(1, 2.0, tpot=0.008))
            await made.until(lambda: made.phase() == "rolled-back")
            assert made.k == 4
            await made.until(lambda: any("ended" in line for line in made.story()))
            for _ in range(8):
                await made.look(evidence(4, 3.0))
            (status,) = made.tuner.statuses()
            assert status.rollbacks == 1
            # Another k may be tried in its time; that one may not.
            begun_to = [e["to_k"] for e in made.audit() if e["what"] == "begun"]
            assert begun_to.count(1) == 1

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["recommend", "off"])
def test_in_other_modes_nothing_is_changed(tmp_path: Path, mode: str) -> None:
    async def run() -> None:
        settings = QUICK.model_copy(update={"mode": mode})
        async with bench(tmp_path, settings) as made:
            for _ in range(5):
                await made.look(evidence(4, 1.0))
            assert made.k == 4
            (status,) = made.tuner.statuses()
            assert status.decision == ("change" if mode == "recommend" else "hold")
            assert made.phase() == ""
            with pytest.raises(Refusal, match="mode"):
                made.tuner.apply(1, "me", made.now)

    asyncio.run(run())


def test_without_an_actuator_it_recommends_and_says_that_it_cannot_act(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            made.tuner.reconfigure(replace_actuator(made.target), QUICK)
            for _ in range(3):
                await made.look(evidence(4, 1.0))
            (status,) = made.tuner.statuses()
            assert (status.recommended_k, status.can_act, made.k) == (1, False, 4)
            with pytest.raises(Refusal, match="no actuator"):
                made.tuner.apply(1, "me", made.now)

    asyncio.run(run())


def replace_actuator(target: Target) -> Target:
    return target.model_copy(update={"actuator": None})


def test_a_pause_holds_at_once_and_outlives_the_process(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            await made.look(evidence(4, 1.0, verdicts={}))
            made.tuner.pause("alice")
            for _ in range(4):
                await made.look(evidence(4, 1.0))
            (status,) = made.tuner.statuses()
            assert (status.decision, status.paused, made.k) == ("pause", "paused by alice", 4)
            made.store.put("tuner", {"m": made.tuner.saved()})
            await made.tuner.stop()
            made.tuner = made.new_tuner(QUICK)
            await made.look(evidence(4, 1.0))
            assert made.tuner.statuses()[0].paused == "paused by alice"
            with pytest.raises(Refusal, match="paused"):
                made.tuner.apply(1, "me", made.now)
            made.tuner.resume("bob")
            await made.look(evidence(4, 1.0))
            await made.until(lambda: made.k == 1)

    asyncio.run(run())


def test_a_pause_before_anything_is_known_holds_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            made.tuner.pause("alice")
            for _ in range(4):
                await made.look(evidence(4, 1.0))
            assert made.tuner.statuses()[0].paused == "paused by alice"
            assert made.k == 4

    asyncio.run(run())


def test_a_change_by_somebody_else_is_respected_and_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            await made.look(evidence(4, 1.0, verdicts={}))
            await made.look(evidence(2, 2.0))
            (status,) = made.tuner.statuses()
            assert status.decision == "pause"
            assert "from 4 to 2 by somebody else" in status.paused
            assert any(e["what"] == "pause" for e in made.audit())
            assert made.k == 4

    asyncio.run(run())


def test_a_k_that_somebody_asks_for_is_verified_like_any_other_and_taken_back_if_worse(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            await made.look(evidence(4, 1.0, verdicts={}))
            assert made.tuner.apply(2, "alice", made.now) == "k 4 to 2 has begun"
            with pytest.raises(Refusal, match="under way"):
                made.tuner.apply(1, "bob", made.now)
            await made.until(lambda: made.phase() == "ready")
            assert made.k == 2
            for _ in range(2):
                await made.look(evidence(2, 2.0, tpot=0.009, verdicts={}))
            await made.until(lambda: made.phase() == "rolled-back")
            assert made.k == 4
            assert any(e.get("reason") == "asked for by alice" for e in made.audit())

    asyncio.run(run())


@pytest.mark.parametrize(("k", "why"), [(4, "runs with k = 4"), (99, "not within")])
def test_a_k_that_makes_no_sense_is_refused_in_words(tmp_path: Path, k: int, why: str) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            await made.look(evidence(4, 1.0, verdicts={}))
            with pytest.raises(Refusal, match=why):
                made.tuner.apply(k, "me", made.now)

    asyncio.run(run())


def test_a_model_that_the_server_no_longer_has_is_neither_shown_nor_in_the_way(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with bench(tmp_path, QUICK.model_copy(update={"settle": 1e6})) as b:
            b.tuner.evaluate({"before": evidence(4, 10.0)}, 1000.0, {})
            b.tuner.evaluate({"m": evidence(4, 20.0)}, 1015.0, {})
            b.tuner.evaluate({}, 1030.0, {})
            assert [status.model_name for status in b.tuner.statuses()] == ["m"]
            assert b.tuner.apply(2, "somebody", 1030.0) == "k 4 to 2 has begun"
            await asyncio.sleep(0)

    asyncio.run(run())


def test_of_two_models_each_counts_its_own_decisions(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(tmp_path, QUICK.model_copy(update={"mode": "recommend"})) as b:
            for now in (1000.0, 1015.0):
                seen = {"m": evidence(4, 0.0), "n": evidence(1, 0.0)}
                b.tuner.evaluate(seen, now, {})
            counted = {status.model_name: dict(status.decisions) for status in b.tuner.statuses()}
            assert counted["m"] == {"hold": 1, "change": 1}
            assert counted["n"] == {"hold": 1}

    asyncio.run(run())


def test_an_alert_from_outside_counts_as_the_rule_until_it_is_resolved(tmp_path: Path) -> None:
    async def run() -> None:
        settings = QUICK.model_copy(update={"mode": "recommend"})
        async with bench(tmp_path, settings) as made:
            seen = replace(evidence(4, 1.0), verdicts={})
            await made.look(seen)
            made.tuner.hear("position_decay", "", firing=True, now=made.now)
            await made.look(seen)
            assert "position 1" in made.tuner.statuses()[0].reason
            made.tuner.hear("position_decay", "", firing=False, now=made.now)
            await made.look(seen)
            assert "position 1" not in made.tuner.statuses()[0].reason
            made.tuner.hear("position_decay", "", firing=True, now=made.now)
            await made.look(seen, seconds=5 * 3600.0)
            assert "position 1" not in made.tuner.statuses()[0].reason

    asyncio.run(run())


def test_an_alert_on_one_model_is_none_on_another(tmp_path: Path) -> None:
    async def run() -> None:
        settings = QUICK.model_copy(update={"mode": "recommend"})
        async with bench(tmp_path, settings) as made:
            seen = replace(evidence(4, 1.0), verdicts={})
            for model, told in (("another", False), ("m", True)):
                made.tuner.hear("position_decay", model, firing=True, now=made.now)
                await made.look(seen)
                assert ("position 1" in made.tuner.statuses()[0].reason) is told

    asyncio.run(run())


def test_a_change_cut_off_by_the_end_of_the_process_is_finished_or_undone_by_the_next(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            await begun(made)
            await made.tuner.stop()
            assert made.phase() == "ready"
            made.tuner = made.new_tuner(QUICK)
            await made.tuner.resume_change()
            await made.until(lambda: made.tuner._task is not None)
            for _ in range(3):
                await made.look(evidence(1, 2.0, tpot=0.004))
            await made.until(lambda: made.phase() in ("verified", "rolled-back"))
            assert made.k == (1 if made.phase() == "verified" else 4)

    asyncio.run(run())


def test_two_tuners_do_not_act_on_one_file(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            await begun(made)
            other = Tuner(made.target, QUICK, Store(None), clock=lambda: made.now)
            other.evaluate({"m": evidence(4, 1.0)}, made.now, {})
            other.evaluate({"m": evidence(4, 1.0)}, made.now + 15, {})
            (status,) = other.statuses()
            assert "only one may" in status.problem
            await other.stop()

    asyncio.run(run())


def test_a_server_that_does_not_come_back_is_given_its_old_k_and_the_reason_is_kept(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with bench(tmp_path) as made:
            failing = made.target.actuator
            assert failing is not None
            broken = failing.model_copy(update={"restart": ("false",)})
            made.tuner.reconfigure(made.target.model_copy(update={"actuator": broken}), QUICK)
            await made.look(evidence(4, 1.0))
            await made.look(evidence(4, 1.0))
            await made.until(lambda: made.phase() in ("rolled-back", "failed"))
            assert made.k == 4
            await made.until(lambda: any(e["what"] == "ended" for e in made.audit()))
            ended = next(e for e in made.audit() if e["what"] == "ended")
            assert "false" in ended["problem"]
            (status,) = made.tuner.statuses()
            assert status.actuation_failures + status.rollbacks == 1

    asyncio.run(run())


def test_a_workload_that_asks_for_another_k_every_few_minutes_is_told_as_flapping(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        settings = QUICK.model_copy(update={"mode": "recommend"})
        async with bench(tmp_path, settings) as made:
            good = Acceptance((0.9, 0.85, 0.8, 0.75), (0.002,) * 4, 50_000.0)
            for i in range(40):
                seen = evidence(4, 1.0, verdicts={})
                await made.look(replace(seen, window=good if i % 2 else seen.window), 300.0)
            (told,) = made.tuner.verdicts()
            assert (told.rule, told.state, told.severity) == ("k_flapping", "firing", "info")
            assert told.value is not None
            assert told.value >= settings.flapping_turns
            for _ in range(100):
                await made.look(evidence(4, 1.0, verdicts={}), 300.0)
            assert made.tuner.verdicts() == ()

    asyncio.run(run())


def test_a_pause_holds_where_the_rest_of_the_state_is_of_another_form_and_costs_no_other_model(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "state.db")
    target = Target(name="m", url="http://127.0.0.1:1")
    before = Tuner(target, QUICK, store)
    before.evaluate({"a": evidence(4, 1.0), "b": evidence(4, 1.0)}, 1.0, {})
    before.pause("somebody")
    saved = before.saved()
    del saved["a"]["tails"]
    saved |= {"c": {"paused": 5}, "d": None}
    store.put("tuner", {"m": saved})
    with capture_logs() as logs:
        after = Tuner(target, QUICK, store).saved()
    assert [entry["event"] for entry in logs] == ["tuner begins anew"] * 3
    assert {model: state["paused"] for model, state in after.items()} == {
        "a": "paused by somebody",
        "b": "paused by somebody",
    }
    assert after["b"]["since"] == saved["b"]["since"] == 1.0
    store.close()
