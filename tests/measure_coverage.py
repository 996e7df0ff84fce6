"""Measures line and branch coverage of the library, kernels included.

    python tests/measure_coverage.py --jobs 8 --out coverage      (or: make coverage)

Numba's kernels count because they run as Python (``NUMBA_DISABLE_JIT=1``) and Triton's because they
run under its interpreter. That is slow, so several pytest processes share one list of tests: each
takes the next test that nobody has taken. A test that takes longer than ``--each`` seconds is
stopped and counted as skipped; after ``--total`` seconds no further test begins. ``--resume`` goes
on where the last measurement stopped, with the tests it did not reach.

This file is its own pytest plugin in those processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jit_off  # noqa: F401
import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[1]
# Many tests of one kind, which come last: most of what they reach was reached before.
LAST = ("test_estimators.py", "test_fenchel_young.py", "test_contract.py")


class Share:
    """The plugin: takes tests from the common list, with a limit of time for each."""

    def __init__(self, folder: Path, each: float, until: float) -> None:
        self.folder, self.each, self.until = folder, each, until
        self.done = set((folder / "done").read_text().splitlines())
        self.saved = time.time()
        self.record = (folder / f"tests.{os.getpid()}").open("w")

    @pytest.hookimpl(trylast=True)  # after those that are not asked for were left out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]
        items.sort(key=lambda item: LAST.index(item.path.name) if item.path.name in LAST else -1)
        for i, item in enumerate(items):
            item.stash[NUMBER] = i
        (self.folder / "count").write_text(str(len(items)))

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        if time.time() > self.until:
            return True  # as if it had been run
        try:
            (self.folder / "taken" / str(item.stash[NUMBER])).touch(exist_ok=False)
        except FileExistsError:
            return True
        if time.time() > self.saved + 60:  # for the case that a later test kills this process
            from coverage import Coverage

            Coverage.current().save()
            self.saved = time.time()
        # nobody knows which test this process takes next, so every fixture is torn down
        runtestprotocol(item, nextitem=None)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        def stop(*_) -> None:
            pytest.skip(f"takes more than {self.each:g} s with the JIT off")

        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, self.each)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            if report.outcome == "skipped":
                row["why"] = str(report.longrepr)[-160:]
            elif report.outcome == "failed":
                row["why"] = report.longreprtext[-4000:]
            print(json.dumps(row), file=self.record, flush=True)


NUMBER = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if "COVERAGE_SHARE" in os.environ:
        folder, each, until = json.loads(os.environ["COVERAGE_SHARE"])
        config.pluginmanager.register(Share(Path(folder), each, until))


def measure(given: argparse.Namespace) -> None:
    """Runs the tests, prints the figures, and leaves them in ``out.json`` and ``out.tests.json``,
    and what coverage.py recorded in ``out.data``."""
    folder, out = Path(tempfile.mkdtemp(prefix="coverage-")), given.out
    before = []
    if given.resume:
        before = json.loads(out.with_suffix(".tests.json").read_text())
        shutil.copy(out.with_suffix(".data"), folder / "data.before")
    (folder / "done").write_text("\n".join(row["test"] for row in before))
    (folder / "taken").mkdir()
    (folder / "site").mkdir()
    # python imports it at the start of every process, of those that tests start too
    (folder / "site" / "sitecustomize.py").write_text("import coverage; coverage.process_startup()")
    paths = [str(folder / "site"), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"),
        "COVERAGE_FILE": str(folder / "data"),
        "COVERAGE_SHARE": json.dumps([str(folder), given.each, time.time() + given.total]),
        "NUMBA_DISABLE_JIT": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "measure_coverage", "--continue-on-collection-errors"]
    command += ["-m", "not slow and not gpu and not bench", *given.selection]
    workers = []
    for i in range(given.jobs):
        log = (folder / f"log.{i}").open("w")
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    limit = time.time() + given.total + given.each + 30
    for worker in workers:
        try:
            worker.wait(max(0.0, limit - time.time()))
        except subprocess.TimeoutExpired:
            worker.kill()
    if not list(folder.glob("data.*")):
        sys.exit((folder / "log.0").read_text())
    report(folder, environment, out, before)


def report(folder: Path, environment: dict[str, str], out: Path, before: list[dict]) -> None:
    rows = [json.loads(line) for path in folder.glob("tests.*") for line in path.open()]
    left = int((folder / "count").read_text()) - len({row["test"] for row in rows})
    rows = sorted(before + rows, key=lambda row: -row["seconds"])
    out.with_suffix(".tests.json").write_text(json.dumps(rows, indent=0))
    for row in rows:
        if row["outcome"] == "failed":
            print(f"FAILED {row['test']}\n{row['why'][-600:]}\n")
    tool = [sys.executable, "-m", "coverage"]
    environment = {k: v for k, v in environment.items() if k != "COVERAGE_PROCESS_START"}

    def run(*arguments: str) -> None:
        subprocess.run([*tool, *arguments], cwd=ROOT, env=environment, check=True)

    run("combine", "--quiet", str(folder))
    shutil.copy(folder / "data", out.with_suffix(".data"))
    run("json", "--quiet", "-o", str(out.with_suffix(".json").absolute()))
    run("report")
    figures = json.loads(out.with_suffix(".json").read_text())["totals"]
    count = Counter(row["outcome"] for row in rows)
    stopped = sum("with the JIT off" in row.get("why", "") for row in rows)
    print(
        f"tests: {count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped, "
        f"{stopped} of them stopped for time; {left} not begun\n"
        f"lines: {figures['covered_lines']} of {figures['num_statements']}, "
        f"{100 * figures['covered_lines'] / figures['num_statements']:.1f}%\n"
        f"branches: {figures['covered_branches']} of {figures['num_branches']}, "
        f"{100 * figures['covered_branches'] / max(1, figures['num_branches']):.1f}%"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--each", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--total", type=float, default=3600.0, help="seconds for all tests")
    parser.add_argument("--out", type=Path, default=Path("coverage"))
    parser.add_argument("--resume", action="store_true", help="run what --out has not yet")
    parser.add_argument("selection", nargs="*", help="test files or names; all of them by default")
    measure(parser.parse_args())
