"""Durations for people."""

from __future__ import annotations

import pytest
from specdec_exporter.duration import rough_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (-3600.5, "0s"),
        (0.25, "250ms"),
        (32.003, "32s"),
        (59.7, "1m"),
        (90.4, "1m30s"),
        (5530.2, "1h32m"),
        (90_061.0, "1d1h"),
        (604_800.0, "7d"),
    ],
)
def test_a_duration_is_said_in_two_units_at_most(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text
