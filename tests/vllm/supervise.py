"""Runs a command, and starts it anew on SIGHUP: what systemd or a container engine does for users.

    python supervise.py COMMAND [ARGUMENT]...

SIGTERM ends both. A command that ends by itself is not started again.
"""

import os
import signal
import subprocess
import sys
import time

process: subprocess.Popen[bytes] | None = None
again = False


def start() -> None:
    global process
    process = subprocess.Popen(sys.argv[1:], start_new_session=True)


def stop() -> None:
    assert process is not None
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def on_hangup(*_: object) -> None:
    global again
    again = True


def on_end(*_: object) -> None:
    stop()
    sys.exit(0)


signal.signal(signal.SIGHUP, on_hangup)
signal.signal(signal.SIGTERM, on_end)
start()
while True:
    time.sleep(0.1)
    if again:
        again = False
        stop()
        start()
