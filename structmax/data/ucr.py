"""Time series of the UCR and UEA archives, with the class of each.

Dau et al., "The UCR time series archive", IEEE/CAA Journal of Automatica Sinica, 2019.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from structmax.data.folder import MOST_TIMES, SMALL, fault, quoted, read_lines


class Series(NamedTuple):
    """Series ``(n, d)`` each, and the numbers ``(k)`` of their classes, whose names are given."""

    series: list[np.ndarray]
    labels: np.ndarray
    classes: list[str]


def read_ts(path: str | Path) -> Series:
    """The series of a ``.ts`` file, possibly compressed (``.xz``).

    Lines that start with # are comments, with @ the header. After ``@data`` a line is a series: its
    features separated by colons, numbers by commas, the class at the end. A malformed line, one
    with missing values included, raises ``ValueError`` with the file, the line's number and what is
    wrong with it.
    """
    found: list[np.ndarray] = []
    labels: list[int] = []
    classes: list[str] | None = None
    inside = False
    for number, line in read_lines(path):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if not inside:
            if not words[0].startswith("@"):
                raise fault(path, number, f"expected @… before @data, got {quoted(line)}")
            if words[0].lower() == "@classlabel":
                if len(words) < 3 or words[1].lower() != "true":
                    raise fault(path, number, "the series must have classes")
                classes = words[2:]
            inside = words[0].lower() == "@data"
            continue
        if classes is None:
            raise fault(path, number, "there is no @classLabel in the header")
        *features, label = line.strip().split(":")
        if not features or label not in classes:
            message = (
                f"expected one of the classes {' '.join(classes)} at the end, got {quoted(label)}"
            )
            raise fault(path, number, message)
        try:
            if any("_" in feature for feature in features):  # Python reads 1_0 as 10
                raise ValueError(f"expected numbers, got {quoted(line)}")
            columns = [[float(value) for value in feature.split(",")] for feature in features]
            series = np.array(columns, np.float64).T  # (n, d)
        except ValueError as error:
            raise fault(path, number, str(error)) from None
        if not np.isfinite(series).all() or (found and series.shape[1] != found[0].shape[1]):
            width = found[0].shape[1] if found else series.shape[1]
            raise fault(path, number, f"expected {width} features and finite values")
        found.append(series)
        labels.append(classes.index(label))
    if classes is None or not found:
        raise ValueError(f"{path}: there are no series")
    return Series(found, np.array(labels), classes)


def read(folder: str | Path) -> tuple[Series, Series]:
    """The train and the test split of a data set in its folder.

    There are ``NAME_TRAIN.ts`` and ``NAME_TEST.ts``, perhaps with ``.xz``, or ``NAME.npz`` with
    X_train ``(k, n, d)``, y_train ``(k)``, X_test and y_test.
    """
    folder = Path(folder)
    splits = [sorted(folder.glob(f"*_{split}.ts*")) for split in ("TRAIN", "TEST")]
    if all(splits):
        train, test = (read_ts(paths[0]) for paths in splits)
        if train.classes != test.classes:
            raise ValueError(f"{folder}: classes are {train.classes} and {test.classes}.")
        return train, test
    arrays = sorted(folder.glob("*.npz"))
    if not arrays:
        raise FileNotFoundError(
            f"there are no NAME_TRAIN.ts and NAME_TEST.ts, nor NAME.npz in {folder}."
        )
    return _read_npz(arrays[0])


def _read_npz(path: Path) -> tuple[Series, Series]:
    names = ("X_train", "y_train", "X_test", "y_test")
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = [member.file_size for member in archive.infolist()]
        if sum(sizes) > SMALL + MOST_TIMES * path.stat().st_size:
            raise ValueError(f"decompressed, there are {sum(sizes)} bytes")
        with np.load(path, allow_pickle=False) as file:
            missing = set(names) - set(file)
            if missing:
                raise ValueError(f"there is no {', '.join(sorted(missing))}")
            found = {name: file[name] for name in names}
        for split in ("train", "test"):
            x, y = found[f"X_{split}"].astype(np.float64), found[f"y_{split}"]
            found[f"X_{split}"] = x
            if x.ndim != 3 or y.shape != x.shape[:1] or not np.isfinite(x).all():
                raise ValueError(
                    f"X_{split} must be (k, n, d) and finite, and y_{split} (k), "
                    f"got {x.shape} and {y.shape}"
                )
        classes = np.unique(found["y_train"])
        if not np.isin(found["y_test"], classes).all():
            raise ValueError("y_test has classes that y_train has not")
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds for damaged files
        raise ValueError(f"{path}: {error or type(error).__name__}.") from error
    train, test = (
        Series(
            list(found[f"X_{split}"]),
            np.searchsorted(classes, found[f"y_{split}"]),
            [str(name) for name in classes],
        )
        for split in ("train", "test")
    )
    return train, test
