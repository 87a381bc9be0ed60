"""A change is carried out step by step; whatever fails, the old k comes back or somebody is told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog
from specdec_exporter.act.actuator import Actuator, FileActuator, lock_path, new_actuator
from specdec_exporter.act.change import Change, Phase, Progress
from specdec_exporter.act.errors import ActError, Refused
from specdec_exporter.act.perform import Performer, Verdict
from specdec_exporter.act.ready import Server
from specdec_exporter.act.settings import ActuatorSettings
from specdec_exporter.act.webhook import Webhook

from tests import pages
from tests.hostile import Exchange, HostileServer, response

CHANGE = Change("c-1", "t", "m", 2, 1, "position decay", 1e9)


def page(k: int) -> bytes:
    text = pages.page(pages.counters(per_position=(47.0, 24.0, 12.0)[:k])).decode()
    kept = [line for line in text.splitlines(keepends=True) if k or "spec_decode" not in line]
    return response("".join(kept).encode())


@dataclass
class Deployment:
    """A server that takes its k from a file when its restart command has run."""

    folder: Path
    kept: bool = True
    reason: str = "faster"
    command: str = "pass"
    command_line_k: int | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    on_record: Callable[[dict[str, Any]], None] = lambda step: None
    restarts: int = 0
    served: int = 2
    ready_timeout: float = 10.0
    verify_seconds: float = 10.0
    actuator: Actuator | None = None

    def __post_init__(self) -> None:
        self.file.write_text("# mine\nspec-method: mtp\nspec-tokens: 2\n")

    @property
    def file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def log(self) -> Path:
        return self.folder / "restarts"

    def answer(self, exchange: Exchange) -> None:
        """The page of the k that was in the file at the last restart."""
        restarts = len(self.log.read_text()) if self.log.exists() else 0
        if restarts != self.restarts:
            self.restarts = restarts
            self.served = self.file_k if self.command_line_k is None else self.command_line_k
        exchange.send(page(self.served))

    @property
    def file_k(self) -> int:
        k = asyncio.run(new_actuator(self.settings()).read_k())
        assert k is not None
        return k

    def settings(self) -> ActuatorSettings:
        command = f"open({str(self.log)!r}, 'a').write('x'); {self.command}"
        return ActuatorSettings(
            kind="vllm-config",
            file=self.file,
            restart=(sys.executable, "-S", "-I", "-c", command),
            ready_timeout=self.ready_timeout,
        )

    async def verify(self, change: Change) -> Verdict:
        assert change == CHANGE
        return Verdict(self.kept, self.reason)

    def run(
        self, work: Callable[[Performer], Any], settings: ActuatorSettings | None = None
    ) -> Progress:
        chosen = settings or self.settings()

        def record(step: dict[str, Any]) -> None:
            self.records.append(step)
            self.on_record(step)

        with HostileServer(self.answer) as http:
            performer = Performer(
                chosen,
                self.actuator or new_actuator(chosen),
                Server(http.url, "m", poll_seconds=0.01),
                self.verify,
                self.verify_seconds,
                record,
            )
            progress = asyncio.run(work(performer))
        assert isinstance(progress, Progress)
        assert self.records[-1] == progress.to_dict()
        return progress

    def apply(self, settings: ActuatorSettings | None = None) -> Progress:
        return self.run(lambda performer: performer.apply(CHANGE), settings)


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def test_a_k_that_proves_itself_stays(deployment: Deployment) -> None:
    progress = deployment.apply()
    assert progress.phase is Phase.VERIFIED
    assert (deployment.file_k, deployment.served, deployment.restarts) == (1, 1, 1)


def test_every_step_is_recorded_before_and_after_it_is_done(deployment: Deployment) -> None:
    deployment.apply()
    assert [(step["phase"], step["begun"]) for step in deployment.records] == [
        ("planned", None),
        ("planned", "write"),
        ("written", None),
        ("written", "restart"),
        ("restarted", None),
        ("restarted", "ready"),
        ("ready", None),
        ("ready", "verify"),
        ("verified", None),
    ]


def test_a_k_that_does_not_prove_itself_is_rolled_back(deployment: Deployment) -> None:
    deployment.kept, deployment.reason = False, "throughput fell by 30 %"
    progress = deployment.apply()
    assert (progress.phase, progress.problem) == (Phase.ROLLED_BACK, "throughput fell by 30 %")
    assert (deployment.file_k, deployment.served, deployment.restarts) == (2, 2, 2)


def test_a_k_that_was_kept_can_be_rolled_back_later(deployment: Deployment) -> None:
    deployment.apply()
    progress = deployment.run(lambda performer: performer.roll_back(CHANGE, "on request"))
    assert (progress.phase, progress.problem) == (Phase.ROLLED_BACK, "on request")
    assert (deployment.file_k, deployment.served) == (2, 2)


def test_a_server_that_does_not_come_up_with_the_new_k_gets_the_old_one(
    deployment: Deployment,
) -> None:
    deployment.command = (
        f"import sys; text = open({str(deployment.file)!r}).read(); "
        "print('CUDA out of memory'); sys.exit('spec-tokens: 1' in text)"
    )
    progress = deployment.apply()
    assert progress.phase is Phase.ROLLED_BACK
    assert progress.problem.endswith("ended with status 1: CUDA out of memory")
    assert progress.output == "CUDA out of memory"
    assert (deployment.file_k, deployment.served, deployment.restarts) == (2, 2, 2)


def test_a_server_that_cannot_be_restarted_at_all_is_told_of(deployment: Deployment) -> None:
    deployment.command = "raise SystemExit('no')"
    progress = deployment.apply()
    assert (progress.phase, progress.undoing) == (Phase.FAILED, True)
    assert "and the way back failed: restart: " in progress.problem
    assert deployment.file_k == 2


def test_a_k_on_the_command_line_is_noticed_and_the_file_is_put_back(
    deployment: Deployment,
) -> None:
    deployment.command_line_k, deployment.ready_timeout = 2, 0.5
    progress = deployment.apply()
    assert progress.phase is Phase.ROLLED_BACK
    assert "it serves k = 2; does its command line set another k?" in progress.problem
    assert deployment.file_k == 2


def test_a_command_that_does_not_exist_costs_no_restart(deployment: Deployment) -> None:
    settings = deployment.settings().model_copy(update={"restart": ("/no/such/command",)})
    progress = deployment.apply(settings)
    assert progress.phase is Phase.ROLLED_BACK
    assert "'/no/such/command' cannot be run (No such file or directory)" in progress.problem
    assert (deployment.file_k, deployment.served, deployment.restarts) == (2, 2, 0)


def test_a_file_that_is_not_understood_is_left_alone(deployment: Deployment) -> None:
    deployment.file.write_text("spec-tokens: &k 2\n")
    progress = deployment.apply()
    assert (progress.phase, progress.undoing) == (Phase.FAILED, False)
    assert progress.problem.startswith(f"{deployment.file}: line 1: an anchor or alias")
    assert deployment.file.read_text() == "spec-tokens: &k 2\n"
    assert deployment.restarts == 0


def test_a_k_that_somebody_else_has_set_is_left_alone(deployment: Deployment) -> None:
    deployment.file.write_text("spec-tokens: 4\n")
    progress = deployment.apply()
    assert (progress.phase, progress.undoing) == (Phase.FAILED, False)
    assert "k is 4 in it, not 2: somebody else changed it" in progress.problem


def test_a_verdict_that_does_not_come_is_against_the_new_k(deployment: Deployment) -> None:
    async def never(change: Change) -> Verdict:
        await asyncio.Event().wait()
        raise AssertionError

    deployment.verify_seconds = 0.05
    deployment.verify = never  # type: ignore[method-assign]
    progress = deployment.apply()
    assert (progress.phase, progress.problem) == (Phase.ROLLED_BACK, "no verdict within 50ms")


def test_a_mistake_of_ours_does_not_leave_a_change_half_done(deployment: Deployment) -> None:
    async def broken(change: Change) -> Verdict:
        raise ZeroDivisionError

    deployment.verify = broken  # type: ignore[method-assign]
    with structlog.testing.capture_logs() as logged:
        progress = deployment.apply()
    assert progress.phase is Phase.ROLLED_BACK
    assert progress.problem == "verify: ZeroDivisionError; please report the log"
    assert [type(entry["exc_info"]) for entry in logged] == [ZeroDivisionError]


def test_what_cannot_be_recorded_is_not_done(deployment: Deployment) -> None:
    def full(step: dict[str, Any]) -> None:
        if step["begun"] == "write":
            raise OSError("the disk is full")

    deployment.on_record = full
    with pytest.raises(OSError, match="the disk is full"):
        deployment.apply()
    assert deployment.file_k == 2


@pytest.mark.parametrize("number", range(9))
def test_a_change_that_was_cancelled_is_finished_or_undone_by_the_next_process(
    deployment: Deployment, number: int
) -> None:
    def stop(step: dict[str, Any]) -> None:
        if len(deployment.records) == number + 1:
            raise asyncio.CancelledError

    deployment.on_record = stop
    with pytest.raises(asyncio.CancelledError):
        deployment.apply()
    saved = deployment.records[-1]
    deployment.on_record = lambda step: None
    progress = deployment.run(lambda performer: performer.resume(saved))
    assert progress.phase is (Phase.ROLLED_BACK if number < 3 else Phase.VERIFIED)
    assert deployment.file_k == deployment.served == progress.k_in_force
    assert deployment.restarts == (0 if number < 3 else 1)


def test_the_old_k_in_the_file_is_not_enough_where_the_server_was_restarted_meanwhile(
    deployment: Deployment,
) -> None:
    deployment.ready_timeout = 2
    written = Progress(CHANGE).begin(applies_itself=False).done().to_dict()
    deployment.file.write_text("spec-method: mtp\nspec-tokens: 1\n")
    deployment.served = 1
    progress = deployment.run(lambda performer: performer.resume(written))
    assert progress.phase is Phase.ROLLED_BACK
    assert (deployment.file_k, deployment.served, deployment.restarts) == (2, 2, 1)


class Platform:
    """Changes k and restarts when it is asked to, as the receiver of a webhook."""

    def __init__(self, deployment: Deployment, *, refuses: bool = False) -> None:
        self.deployment, self.refuses = deployment, refuses
        self.asked: list[Change] = []

    async def read_k(self) -> int | None:
        return None

    async def set_k(self, change: Change) -> None:
        self.asked.append(change)
        if self.refuses and len(self.asked) == 1:
            raise ActError("webhook: status 503")
        self.deployment.served = change.to_k


def webhook(deployment: Deployment) -> ActuatorSettings:
    return ActuatorSettings.model_validate({"kind": "webhook", "url": "http://x/", "secret": "s"})


def test_a_webhook_is_asked_for_the_new_k_and_for_the_old_one_when_that_fails(
    deployment: Deployment,
) -> None:
    deployment.kept = False
    deployment.actuator = platform = Platform(deployment)
    progress = deployment.apply(webhook(deployment))
    assert progress.phase is Phase.ROLLED_BACK
    assert [(c.key, c.to_k) for c in platform.asked] == [("c-1", 1), ("c-1-undo", 2)]
    assert deployment.served == 2


def test_a_webhook_that_may_have_acted_is_asked_for_the_old_k(deployment: Deployment) -> None:
    deployment.actuator = platform = Platform(deployment, refuses=True)
    assert deployment.apply(webhook(deployment)).phase is Phase.ROLLED_BACK
    assert [c.to_k for c in platform.asked] == [1, 2]


def test_each_kind_has_its_actuator_and_its_lock(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("K=2\n")
    env = ActuatorSettings(kind="env-file", file=file, variable="K")
    actuator = new_actuator(env)
    assert isinstance(actuator, FileActuator)
    asyncio.run(actuator.set_k(CHANGE))
    asyncio.run(actuator.set_k(CHANGE))
    assert file.read_text() == "K=1\n"
    assert lock_path(env, tmp_path / "state").parent == tmp_path
    hook = webhook(Deployment(tmp_path))
    assert isinstance(new_actuator(hook), Webhook)
    assert asyncio.run(new_actuator(hook).read_k()) is None
    assert lock_path(hook, tmp_path / "state").parent == tmp_path / "state"


def test_a_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    missing = tmp_path / "config.yaml"
    actuator = new_actuator(ActuatorSettings(kind="vllm-config", file=missing))
    with pytest.raises(Refused) as caught:
        asyncio.run(actuator.read_k())
    assert str(caught.value).count(str(missing)) == 1
