"""The packages that structmax needs, with their versions and licences.

::

    python tests/list_dependencies.py > docs/dependencies.md    # or: make audit
"""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PERMITTED = (
    "MIT",
    "BSD",
    "Apache",
    "PSF",
    "Python Software Foundation",
    "Python-2.0",
    "MPL",
    "ISC",
    "Unlicense",
    "Zlib",
    "HPND",
    "0BSD",
)
"""Licences that allow use and redistribution in any program."""

# Parts of torch for GPUs, which come with its CUDA builds alone, under a licence of their own.
VENDOR = ("nvidia-", "cuda-")


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _project() -> dict[str, list[str]]:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"base": listed["dependencies"], **listed["optional-dependencies"]}


def extras() -> list[str]:
    return list(_project())


def direct(extra: str) -> set[str]:
    """What an extra asks for itself, through extras of this package too."""
    found: set[str] = set()
    for text in _project()[extra]:
        asked = Requirement(text)
        if plain(asked.name) == "structmax":
            found |= {name for other in asked.extras for name in direct(other)}
        else:
            found.add(plain(asked.name))
    return found


def closure(*wanted: str) -> list[str]:
    """Everything that is installed for some extras."""
    found: dict[str, set[str]] = {}  # with the extras of the package itself
    due = [(name, set[str]()) for extra in wanted for name in direct(extra)]
    while due:
        name, asked = due.pop()
        if name in found and asked <= found[name]:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found[name] = found.get(name, set()) | asked
        for text in requires:
            needed = Requirement(text)
            environments = [{"extra": extra} for extra in found[name] | {""}]
            if needed.marker is None or any(map(needed.marker.evaluate, environments)):
                due.append((plain(needed.name), set(needed.extras)))
    return sorted(found)


def licence(name: str) -> str:
    """As the package says it, in a few words."""
    about = metadata.metadata(name)
    if expression := about.get("License-Expression"):
        return expression
    classified = [
        text.rpartition(" :: ")[2]
        for text in about.get_all("Classifier") or []
        if text.startswith("License ::")
    ]
    if classified := [text for text in classified if text != "OSI Approved"]:
        return ", ".join(classified)
    return (about.get("License") or "not said").splitlines()[0][:60]


def permitted(name: str) -> bool:
    return name.startswith(VENDOR) or any(word in licence(name) for word in PERMITTED)


def main() -> None:
    listed = {extra: closure(extra) for extra in extras()}
    print("---\norphan: true\n---\n\n# Dependencies\n")
    print("What each extra installs, with what that needs in turn; `make audit` writes this page")
    print(
        "from what is installed, and looks for known vulnerabilities. A name in bold is asked for"
    )
    print(
        "by structmax itself. CUDA builds of torch bring NVIDIA's libraries, under its licence.\n"
    )
    for extra, names in listed.items():
        known = set(listed["base"]) if extra != "base" else set()
        more = [name for name in names if name not in known]
        missing = sorted(direct(extra) - set(names))
        if not more and not missing:
            continue
        print(f"## {extra}\n")
        print("| package | version | licence |\n|---|---|---|")
        for name in more:
            shown = f"**{name}**" if name in direct(extra) else name
            print(f"| {shown} | {metadata.version(name)} | {licence(name)} |")
        for name in missing:
            print(f"| **{name}** | not installed where this was written | |")
        print()
    listed.pop("bench", None)  # peers to compare with, which nothing imports
    refused = sorted({n for names in listed.values() for n in names if not permitted(n)})
    if refused:
        sys.exit(f"licences to look at: {', '.join(refused)}")


if __name__ == "__main__":
    main()
