"""Where data sets are on disk, and how their lines are read."""

from __future__ import annotations

import lzma
import os
from collections.abc import Iterator
from pathlib import Path


def data_folder(given: str | Path | None = None) -> Path:
    """The folder of data sets: the one given, ``STRUCTMAX_DATA``, or ``../shared/data`` beside the
    checkout. It need not exist.

    >>> str(data_folder("corpora"))
    'corpora'
    """
    if given:
        return Path(given)
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return Path(os.environ.get("STRUCTMAX_DATA") or beside)


def find_data(name: str | Path, given: str | Path | None = None) -> Path:
    """A file or folder among the data sets; a name that exists as it is, is taken as it is.

    Of a file that is only there compressed, the name with ``.xz`` is found.

    >>> find_data("no/such.txt", "corpora")
    Traceback (most recent call last):
    FileNotFoundError: there is no no/such.txt in corpora. Say where with --data FOLDER or ...
    """
    folder = data_folder(given)
    for path in (Path(name), folder / name, folder / f"{name}.xz"):
        if path.exists():
            return path
    raise FileNotFoundError(
        f"there is no {name} in {folder}. Say where with --data FOLDER or STRUCTMAX_DATA."
    )


def read_lines(path: str | Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """The lines of a text file, numbered from 1, without their ends; ``.xz`` is decompressed."""
    path, number = Path(path), 0
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding=encoding, newline="\n") as lines:
        try:
            for number, line in enumerate(lines, 1):
                yield number, line.rstrip("\r\n")
        except (UnicodeDecodeError, EOFError, lzma.LZMAError) as error:
            raise fault(path, number + 1, str(error)) from None


def fault(path: str | Path, number: int, message: str) -> ValueError:
    """The error of a malformed line: the file, the line's number and what is wrong with it.

    >>> fault("train.txt", 3, "no label")
    ValueError('train.txt:3: no label')
    """
    return ValueError(f"{path}:{number}: {message}")
