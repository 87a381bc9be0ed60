"""A server whose k comes from its configuration at start, and the command that restarts it.

    python -S -I act_server.py FOLDER PORT

ends the server that runs and starts another, which reads config.yaml and serves the page of its k.
As with any service manager, restarts wait for each other, and the command returns before the server
is ready. Only what starts quickly is imported.
"""

import _socket as socket  # the module around it takes longer to import than all the rest
import fcntl
import os
import sys
import time


def main(folder: str, port: int) -> None:
    os.chdir(folder)
    with open("restart.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists("closed"):
            return
        try:
            with open("pid") as file:
                os.kill(int(file.read()), 9)
        except (OSError, ValueError):
            pass
        pid = os.fork()
        if pid == 0:
            lock.close()
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            serve(port)
        with open("pid.new", "w") as file:
            file.write(str(pid))
        os.replace("pid.new", "pid")


def serve(port: int) -> None:
    time.sleep(0.005)
    with open("config.yaml") as file:
        lines = [line.split() for line in file.read().splitlines()]
    k = next((int(line[1]) for line in lines if line[:1] == ["spec-tokens:"]), 0)
    with open(f"page_{k}.prom", "rb") as file:
        page = file.read()
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(page)}\r\n\r\n".encode() + page
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        try:
            listener.bind(("127.0.0.1", port))
            break
        except OSError:
            time.sleep(0.002)
    listener.listen()
    while True:
        descriptor, _ = listener._accept()
        peer = socket.socket(fileno=descriptor)
        try:
            if peer.recv(4096):
                peer.sendall(answer)
        except OSError:
            pass
        peer.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
