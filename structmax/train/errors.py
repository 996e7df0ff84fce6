"""Errors that are the user's to fix: one line, which the command line prints before it exits."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

TOO_LARGE = "this needs more memory than there is; make it smaller."


class UserError(Exception):
    """Something to fix outside the code; the message is one line that says what and how.

    >>> from structmax.train import tasks
    >>> tasks.by_name("lisops")
    Traceback (most recent call last):
    structmax.train.errors.UserError: ... Did you mean 'listops'?
    """


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
    """What goes wrong inside is the user's input: bad values, broken lines, files that are not, and
    more than there is memory for."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(TOO_LARGE) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a device.

    >>> is_out_of_memory(torch.OutOfMemoryError()), is_out_of_memory(RuntimeError("else"))
    (True, False)
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = ("allocate memory", "Storage size calculation overflowed")  # torch's, on the host
    return isinstance(error, RuntimeError) and any(text in str(error) for text in said)
