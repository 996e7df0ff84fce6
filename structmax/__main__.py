"""``structmax`` and ``python -m structmax``."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line, or a word about what it needs."""
    try:
        sys.exit(_run())
    except KeyboardInterrupt:  # as the imports go on; the command line says the same of its own
        sys.exit(130)


def _run() -> int:
    try:
        import rich  # noqa: F401
        import safetensors  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"structmax: the command line needs {error.name}: pip install 'structmax[cli]'",
            file=sys.stderr,
        )
        return 2
    from structmax.cli import main as run

    return run()


if __name__ == "__main__":
    main()
