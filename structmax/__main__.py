"""``structmax`` and ``python -m structmax``."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line, or a word about what it needs."""
    try:
        import rich  # noqa: F401
        import safetensors  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"structmax: the command line needs {error.name}: pip install 'structmax[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from structmax.cli import main as run

    sys.exit(run())


if __name__ == "__main__":
    main()
