"""The settings of an actuator are complete, or their mistake is named without its secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from specdec_exporter.act.__main__ import main
from specdec_exporter.act.settings import ActuatorSettings

FILE = {"kind": "vllm-config", "file": "/etc/vllm.yaml"}
ENV = {"kind": "env-file", "file": "/etc/vllm.env", "variable": "K"}
HOOK = {"kind": "webhook", "url": "https://platform/k", "secret": "hunter2\n"}


@pytest.mark.parametrize("given", [FILE, ENV, HOOK])
def test_each_kind_is_complete_with_what_it_needs(given: dict[str, Any]) -> None:
    settings = ActuatorSettings.model_validate(given)
    assert settings.applies_itself
    assert "hunter2" not in repr(settings)


def test_nothing_may_be_given_by_name() -> None:
    nothing = {"variable": None, "url": None, "secret": None, "ready_url": None}
    assert ActuatorSettings.model_validate(FILE | nothing).kind == "vllm-config"


def test_durations_and_commands_are_read() -> None:
    settings = ActuatorSettings.model_validate(
        FILE | {"restart": ["systemctl", "restart", "vllm"], "ready_timeout": "20m"}
    )
    assert settings.restart == ("systemctl", "restart", "vllm")
    assert settings.ready_timeout == 1200
    assert not settings.applies_itself


def test_the_line_break_at_the_end_of_a_secret_is_not_part_of_it() -> None:
    secret = ActuatorSettings.model_validate(HOOK).secret
    assert secret is not None
    assert secret.get_secret_value() == "hunter2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "vllm-config"}, "vllm-config needs file"),
        (FILE | {"variable": "K"}, "vllm-config has no variable"),
        (FILE | {"file": "etc/vllm.yaml"}, "'etc/vllm.yaml' is not an absolute path"),
        ({"kind": "env-file", "file": "/etc/vllm.env"}, "env-file needs variable"),
        (ENV | {"variable": "A-B"}, "'A-B' is not the name of a variable"),
        ({"kind": "webhook", "url": "http://x"}, "webhook needs secret"),
        (HOOK | {"file": "/x"}, "webhook has no file"),
        (HOOK | {"secret": " \n"}, "the secret is empty"),
        (HOOK | {"url": "ftp://me:hunter2@x"}, "not a URL"),
        (HOOK | {"url": "http://[x"}, "not a URL"),
        (FILE | {"restart": "systemctl restart vllm"}, "expected a list"),
        (FILE | {"restart": [""]}, "expected the name of a command"),
        (FILE | {"ready_timeout": "0s"}, "not above 0"),
        (FILE | {"ready_url": "health"}, "not a URL"),
        (FILE | {"kind": "kubernetes"}, "'vllm-config', 'env-file' or 'webhook'"),
        (FILE | {"restarts": []}, "Extra inputs"),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        ActuatorSettings.model_validate(given)
    assert "hunter2" not in "".join(error["msg"] for error in caught.value.errors())


def test_one_can_be_tried_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("spec-method: mtp\nspec-tokens: 2\n")
    assert main([str(file)]) == 0
    assert main([str(file), "--k", "1"]) == 0
    assert main([str(file), "--k", "1"]) == 0
    assert capsys.readouterr().out == "k = 2\nk = 1, was 2\nk = 1\n"
    assert file.read_text() == "spec-method: mtp\nspec-tokens: 1\n"
    assert main([str(file), "--variable", "K"]) == 1
    said = capsys.readouterr().err
    assert said == f"{file}: line 1: neither NAME=value nor a comment, or a quote is open\n"
