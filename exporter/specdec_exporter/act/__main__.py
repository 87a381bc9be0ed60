"""Reads or writes the k of one file, to try it by hand: `python -m specdec_exporter.act FILE`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from specdec_exporter.act.actuator import lock_path, new_actuator
from specdec_exporter.act.change import Change
from specdec_exporter.act.errors import ActError
from specdec_exporter.act.lock import ControllerLock
from specdec_exporter.act.settings import ActuatorSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1, with a line on standard error, where the file is refused."""
    parser = argparse.ArgumentParser(prog="python -m specdec_exporter.act", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--variable", help="of an environment file; without it the file is YAML")
    parser.add_argument("--k", type=int, choices=range(100), metavar="K", help="to be written")
    given = parser.parse_args(arguments)
    kind = "vllm-config" if given.variable is None else "env-file"
    file = given.file.absolute()
    settings = ActuatorSettings.model_validate(
        {"kind": kind, "file": file, "variable": given.variable}
    )
    try:
        asyncio.run(_show_or_set(settings, given.k))
    except ActError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _show_or_set(settings: ActuatorSettings, k: int | None) -> None:
    actuator = new_actuator(settings)
    before = await actuator.read_k()
    if k is None or before is None or k == before:
        print(f"k = {before}")
        return
    with ControllerLock(lock_path(settings, Path())):
        await actuator.set_k(Change("by-hand", "", "", before, k, "by hand", time.time()))
    print(f"k = {k}, was {before}")


if __name__ == "__main__":
    sys.exit(main())
