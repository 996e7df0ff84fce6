"""Starts the explorer on this machine alone, behind a token."""

from __future__ import annotations

import logging
import runpy
import secrets
import socket
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

from structmax.explore.pages import NAMES
from structmax.train.errors import UserError, near

HOST = "127.0.0.1"
FIRST_PORT = 2718


def serve(port: int | None, page: str, run: Path | None, browser: bool) -> None:
    """Serve until Ctrl-C; the address, with its token, is printed."""
    if find_spec("marimo") is None:
        raise UserError("explore needs marimo: pip install 'structmax[explore]'")
    if page not in NAMES:
        raise UserError(f"there is no page {page!r}. {near(page, NAMES)}")
    if run is not None:
        from structmax.explore.model import trained

        trained(str(run))  # what is wrong with it is said now
    port = free_port() if port is None else check_port(port)
    token = secrets.token_urlsafe(16)
    address = f"http://{HOST}:{port}/?access_token={token}"
    threading.Thread(target=_announce, args=(address, port), daemon=True).start()
    # Ctrl-C cancels what the server waits for, which it would print as an error of its own.
    logging.getLogger("uvicorn.error").addFilter(lambda r: "CancelledError" not in r.getMessage())
    # Its command line is what marimo documents. Run in this process, the token is in no list of
    # processes.
    sys.argv = [
        *("marimo", "--quiet", "--yes", "run", str(Path(__file__).with_name("app.py"))),
        *("--host", HOST, "--port", str(port), "--token-password", token),
        *("--no-check", "--no-sandbox", *([] if browser else ["--headless"])),
        *("--", "--page", page, *([] if run is None else ["--run", str(run)])),
    ]
    runpy.run_module("marimo", run_name="__main__")


def _announce(address: str, port: int) -> None:
    """Print the address once somebody answers there."""
    while True:
        with socket.socket() as caller:
            if caller.connect_ex((HOST, port)) == 0:
                print(address, flush=True)
                return
        time.sleep(0.1)


def free_port(first: int = FIRST_PORT) -> int:
    """The first port from ``first`` on that nobody listens at."""
    for port in range(first, first + 200):
        try:
            check_port(port)
        except UserError:
            continue
        return port
    raise UserError(f"no port from {first} to {first + 199} is free. Choose one with --port.")


def check_port(port: int) -> int:
    """A port where one can listen: this one, or of 0 any free one. Otherwise a UserError."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, port))
            return int(tried.getsockname()[1])
        except (OSError, OverflowError) as error:
            raise UserError(f"port {port} cannot be used: {error}. Choose another.") from error
