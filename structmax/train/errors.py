"""Errors that are the user's to fix: one line, which the command line prints before it exits."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something to fix outside the code; the message is one line that says what and how."""


def near(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: what was perhaps meant, and what there is.

    >>> near("lisops", ["listops", "toy"])
    "Did you mean 'listops'?"
    >>> near("qqq", ["listops", "toy"])
    'There are: listops, toy.'
    """
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"There are: {', '.join(names)}."


@contextmanager
def as_user_error() -> Iterator[None]:
    """What goes wrong inside is the user's input: bad values, broken lines, files that are not."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error
