"""Where data sets are on disk, and how their lines are read."""

from __future__ import annotations

import codecs
import json
import lzma
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_LINE = 1 << 24  # characters
MOST_TIMES = 500  # what a compressed file may grow by; text grows by less than ten
SMALL = 1 << 26  # bytes that a file may always grow to
LONGEST_QUOTE = 40  # characters
_SPLIT = re.compile(r"(?<![a-z])(train|dev|val|testa(?![a-z])|test)")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class DataWarning(UserWarning):
    """Something in the data that a user should know; the command line prints it as one line."""


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
    """A file or folder among the data sets, or one of that name in the working directory.

    A folder that is ``given`` comes before the working directory, ``STRUCTMAX_DATA`` and the usual
    folder come after it. Of a file that is only there compressed, the name with ``.xz`` is found.

    >>> find_data("no/such.txt", "corpora")
    Traceback (most recent call last):
    FileNotFoundError: there is no no/such.txt in corpora. Say where with --data FOLDER or ...
    """
    for path in _places(name, given):
        return path
    if Path(name).is_absolute():
        raise FileNotFoundError(f"there is no {name}.")
    raise FileNotFoundError(
        f"there is no {name} in {data_folder(given)}. Say where with --data FOLDER or "
        "STRUCTMAX_DATA."
    )


def _places(name: str | Path, given: str | Path | None) -> Iterator[Path]:
    """The files or folders of a name, the first to be taken first."""
    folder = data_folder(given)
    for place in (folder, Path()) if given else (Path(), folder):
        yield from (path for path in (place / name, place / f"{name}.xz") if path.exists())


def find_splits(
    corpus: str | Path, given: str | Path | None = None, end: str = ""
) -> list[list[Path]]:
    """The files of the splits train, dev and test of a folder among the data sets.

    A split is all files that are named after it and end in ``end``, in the order of their names:
    ``x-train-a.conllu``, ``x-train-b.conllu.xz``. Of several such words in a name the last one
    counts; ``val`` and ``testa`` are other words for ``dev``, and ``testb`` for ``test``. A folder
    of the corpus's name that lacks a split is passed over if another one has all.
    """
    missing = ""
    for folder in _places(corpus, given):
        if not folder.is_dir():
            missing = missing or f"{folder} is no folder."
            continue
        found: dict[str, dict[str, Path]] = {"train": {}, "dev": {}, "test": {}}
        for path in sorted(folder.iterdir()):
            name = path.name.removesuffix(".xz")
            words = _SPLIT.findall(name.lower())
            if words and name.endswith(end) and path.is_file():
                split = found[{"val": "dev", "testa": "dev"}.get(words[-1], words[-1])]
                split.setdefault(name, path)  # one that is there compressed too is read once
        if all(found.values()):
            return [list(files.values()) for files in found.values()]
        absent = next(split for split, files in found.items() if not files)
        missing = missing or f"there is no {f'{end} file'.strip()} named {absent} in {folder}."
    if not missing:
        find_data(corpus, given)  # whose error says that there is no such folder
    raise FileNotFoundError(missing)


def read_splits(
    corpus: str | Path,
    given: str | Path | None,
    end: str,
    read: Callable[[Path], Sequence[T]],
) -> list[list[T]]:
    """The examples of the splits train, dev and test, which ``read`` reads from each file."""
    splits = find_splits(corpus, given, end)
    return [[one for path in files for one in read(path)] for files in splits]


def read_lines(path: str | Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """The lines of a text file, numbered from 1, without their ends; ``.xz`` is decompressed.

    It is as it is read, so that little memory is used. A byte order mark is left out. What never
    ends a line, or grows out of all proportion, is no text, and refused.
    """
    path, number, size = Path(path), 0, 0
    compressed = path.suffix == ".xz"
    encoding = "utf-8-sig" if _codec(encoding) == "utf-8" else encoding
    most = SMALL + MOST_TIMES * path.stat().st_size if compressed else None
    with (lzma.open if compressed else open)(path, "rt", encoding=encoding, newline="\n") as lines:
        try:
            for number, line in enumerate(iter(partial(lines.readline, LONGEST_LINE + 1), ""), 1):
                size += len(line)
                if len(line) > LONGEST_LINE:
                    raise fault(path, number, f"a line of more than {LONGEST_LINE} characters")
                if most is not None and size > most:
                    raise fault(path, number, f"decompressed, there are more than {most} bytes")
                yield number, line.rstrip("\r\n")
        except (UnicodeDecodeError, EOFError, lzma.LZMAError) as error:
            raise fault(path, number + 1, str(error)) from None
        except MemoryError:  # of a compressed file that asks for a dictionary of gigabytes
            raise fault(path, number + 1, "there is not enough memory to decompress it") from None


def _codec(encoding: str) -> str:
    """The name of an encoding, of the many that it may have."""
    try:
        "".encode(encoding)  # not all that Python knows are of text
        return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        raise ValueError(f"there is no encoding {encoding!r}. Try utf-8 or latin-1.") from None


def read_objects(path: str | Path, *names: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a file of JSON objects, numbered from 1, each of which has these names."""
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers too long, nested too deep
            raise fault(path, number, f"not JSON: {error}") from None
        if _SURROGATE.search(line) and not _is_text(row):
            raise fault(path, number, "half of a surrogate pair is no character")
        if not isinstance(row, dict) or not row.keys() >= set(names):
            listed = f"{', '.join(names[:-1])} and {names[-1]}"
            raise fault(path, number, f"expected an object with {listed}")
        yield number, row


def _is_text(value: Any) -> bool:
    """Whether a file can hold what JSON said."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def quoted(text: str) -> str:
    """Input as errors quote it: of what is long, the beginning.

    >>> quoted("a word"), quoted("[MAX " * 1000)
    ("'a word'", "'[MAX [MAX [MAX [MAX [MAX [MAX [MAX [MAX…'")
    """
    return repr(text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE].rstrip()}…")


def fault(path: str | Path, number: int, message: str) -> ValueError:
    """The error of a malformed line: the file, the line's number and what is wrong with it.

    >>> fault("train.txt", 3, "no label")
    ValueError('train.txt:3: no label')
    """
    return ValueError(f"{path}:{number}: {message}")
