"""Settings that hold for every test."""

import os

from hypothesis import settings

# A shared machine is slow at times, so no example has a deadline; in the continuous integration the
# examples are the same in every run.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
