"""Prometheus and Alertmanager on an exporter of this machine, to see alerts come and go: `make monitor`.

They run with the rules and routes that the project ships, the times in them shortened, and what
Alertmanager sends is printed here.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.real import debian
from tests.real.prometheus_bed import running, running_alertmanager

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "monitor"
EXPORTER = "127.0.0.1:19185"
PROMETHEUS, ALERTMANAGER, RECEIVER = "127.0.0.1:9090", "127.0.0.1:9093", "127.0.0.1:9095"
"""Where the files in deploy/ and alerts/ expect them."""
QUICK: dict[str, Any] = {
    "windows": "30s",
    "rules": {
        "evaluation_interval": "5s",
        "keep_firing_for": "15s",
        "drafter_broken": {"for": "15s"},
        "drafter_misaligned": {"for": "15s"},
        "acceptance_low": {"for": "15s"},
        "target_down": {"for": "15s"},
    },
}
"""Settings of the rules. The thresholds are the usual ones; what takes minutes takes seconds."""


class CannotRunError(Exception):
    """Ends the program with one line."""


def host_port(address: str) -> tuple[str, int]:
    """As sockets take an address."""
    host, _, port = address.partition(":")
    return host, int(port)


def refuse_taken_ports() -> None:
    """Nothing of ours could be told from what answers there already."""
    for address in (PROMETHEUS, ALERTMANAGER, RECEIVER):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(host_port(address))
            except OSError as error:
                raise CannotRunError(
                    f"{address} is taken ({error.strerror}); end that first"
                ) from None


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for alert in message["alerts"]:
            labels = alert["labels"]
            print(
                time.strftime("%H:%M:%S"),
                f"{alert['status']:8}",
                labels["alertname"],
                labels.get("target", labels.get("instance", "")),
                alert["annotations"].get("summary", ""),
                flush=True,
            )
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def rules(folder: Path) -> Path:
    """The rules with quick times, as the command prints them."""
    settings, written = folder / "specdec.yaml", folder / "specdec.rules.yaml"
    YAML().dump(QUICK, settings)
    command = Path(sys.executable).with_name("specdec-exporter")
    with written.open("wb") as output:
        subprocess.run([command, "rules", "--config", settings], stdout=output, check=True)
    return written


def routes() -> dict[str, Any]:
    """The example for Alertmanager, with quick times."""
    config: dict[str, Any] = YAML(typ="safe").load(ROOT / "alerts" / "alertmanager.example.yaml")
    (route,) = config["route"]["routes"]
    route |= {"group_wait": "10s", "group_interval": "10s"}
    return config


def run() -> None:
    """Run both until somebody presses Ctrl-C.

    Raises:
        CannotRunError: a program is missing or a port is taken.
    """
    try:
        binaries = [debian.ensure(name) for name in ("prometheus", "prometheus-alertmanager")]
    except debian.MissingProgramError as error:
        raise CannotRunError(str(error)) from error
    refuse_taken_ports()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with (
        ThreadingHTTPServer(host_port(RECEIVER), _Receiver) as receiver,
        running_alertmanager(binaries[1], FOLDER, routes(), ALERTMANAGER) as alertmanager,
        running(
            binaries[0],
            FOLDER,
            {"specdec": f"http://{EXPORTER}/metrics"},
            "5s",
            PROMETHEUS,
            rule_files=[rules(FOLDER)],
            alertmanager=alertmanager,
        ),
    ):
        print(
            f"Prometheus    http://{PROMETHEUS}/alerts\n"
            f"Alertmanager  http://{ALERTMANAGER}\n"
            f"Files         {FOLDER.relative_to(ROOT)}\n\n"
            "What Alertmanager sends is shown below. Ctrl-C ends all.\n",
            flush=True,
        )
        receiver.serve_forever()


def main() -> int:
    """Entry point."""
    # Whoever ends this ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        return 0
    except (CannotRunError, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
