"""Starting the explorer, for tests of its server and of its pages."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRAIN = """
train listops --steps 2 --batch-size 8 --eval-every 2 --device cpu --hidden-size 8 --examples 16
--valid-examples 8 --test-examples 8 --max-depth 3 --max-args 3 --min-length 4 --max-length 12
--encoder cky
""".split()  # noqa: SIM905


def train(folder: Path) -> Path:
    """A run, of two updates."""
    from structmax.cli import main

    assert main([*TRAIN, "--out", str(folder)]) == 0
    return folder


def _unused_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


@contextmanager
def explorer(*options: object) -> Iterator[str]:
    """The address that ``structmax explore`` prints, while it runs; Ctrl-C then ends it quietly."""
    command = [sys.executable, "-m", "structmax", "explore", "--no-browser"]
    command += ["--port", str(_unused_port()), *map(str, options)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path.home()
    )
    try:
        assert running.stdout is not None
        address = running.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), address + running.stdout.read()
        yield address
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=60)
        assert running.returncode == 0 and "Traceback" not in said and "quit" not in said, said
    finally:
        running.kill()
        running.wait()
