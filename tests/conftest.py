"""What holds for every test."""

import os

import pytest
from hypothesis import settings

# A shared machine is slow at times, so no example has a deadline; in the continuous integration the
# examples are the same in every run.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(autouse=True)
def no_settings_from_outside(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the exporter every SPECDEC_ variable is a setting, SPECDEC_CACHE of the test bed a wrong one.

    The tests with real programs need that one, and keep it from the exporters that they start.
    """
    if "real" not in request.path.parts:
        for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
            monkeypatch.delenv(name)
