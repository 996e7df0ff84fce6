"""Mutation testing of the Python layers of the engine, SparseMAP and the estimators.

    python tests/mutation/run.py --jobs 8 --out mutation

First the tests run once, and each line remembers which tests reach it. Then each of a sample of
mutants (see ``mutate.py``) is given to tests that reach its lines, the fastest first and taken from
all test files in turn, for at most ``--budget`` seconds of test time: it is killed where one fails,
or where the tests take far longer than before. Kernels of numba and Triton are not mutated; numba's
run as Python, so that no mutant meets a stale cache.

``--out`` names ``out.map.json.gz`` (lines and their tests) and ``out.json`` (the mutants), which
are read again where they exist: a run that was stopped goes on. The processes are forked from one
that has imported torch but not the library, and work on copies of the library.
"""

from __future__ import annotations

import argparse
import compileall
import gzip
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from mutate import Mutant, mutants  # noqa: E402

PACKAGES = ("forest", "sparse", "estimators")
# What reaches those packages; the files most to the point come first, the longest last.
TESTS = """
ops estimator_identities expectations factor_graph sparsemap sparsemap_cpu pcfg
smoothed_dp rules smoothing diagnose errors alignment sequences trees segments_paths
subsets_matchings nonprojective crf losses soft_dtw structured_attention gaps kernels
chain_gpu grid_gpu estimators fenchel_young contract
"""
MARKS = "not slow and not gpu and not bench and not data"


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def targets() -> list[str]:
    """The files to mutate: those that hold no kernels."""
    files = sorted(p for name in PACKAGES for p in (ROOT / "structmax" / name).rglob("*.py"))
    names = [str(p.relative_to(ROOT)) for p in files]
    return [n for n in names if "@kernel" not in source(n) and "import triton" not in source(n)]


def sample(count: int, seed: int) -> list[Mutant]:
    found = [m for file in targets() for m in mutants(file, source(file))]
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[i] for i in chosen]  # in no order: a part of them is a sample too


def tests() -> list[str]:
    names = [f"tests/test_{name}.py" for name in TESTS.split()]
    return [n for n in names if (ROOT / n).exists()] + [f"structmax/{p}" for p in PACKAGES]


def copies_of_library(count: int) -> list[Path]:
    """Folders with the library and its tests, where a mutant may stand."""
    first, *others = folders = [Path(tempfile.mkdtemp(prefix="mutant-")) for _ in range(count)]
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("structmax", "tests"):
        shutil.copytree(ROOT / name, first / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", first)
    compileall.compile_dir(first / "structmax", quiet=2)
    for folder in others:
        shutil.copytree(first, folder, dirs_exist_ok=True)
    return folders


def fork(folder: Path, task: Callable[[], int]) -> int:
    """The id of a new process that runs the task inside the folder, silently."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setpgid(0, 0)  # so that what its tests start can be ended with it
        os.chdir(folder)
        sys.path[:0] = [str(folder), str(folder / "tests")]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = task()
    finally:
        sys.stdout.flush()
        os._exit(code)


class Mapper:
    """The pytest plugin of the first run: which lines of the targets each test reaches."""

    def __init__(self, share: Path, folder: Path, until: float) -> None:
        from coverage import Coverage

        self.share, self.folder, self.until = share, folder, until
        self.seconds: dict[str, float] = {}
        include = [str(folder / file) for file in targets()]
        self.coverage = Coverage(data_file=None, include=include, config_file=False)
        self.coverage.start()

    def pytest_runtest_protocol(self, item) -> bool:
        import pytest
        from _pytest.runner import runtestprotocol

        if time.time() > self.until:
            return True
        try:
            (self.share / str(item.session.items.index(item))).touch(exist_ok=False)
        except FileExistsError:
            return True
        self.coverage.switch_context(item.nodeid)
        signal.signal(signal.SIGALRM, lambda *_: pytest.skip("too slow for a mutant"))
        signal.setitimer(signal.ITIMER_REAL, 10)
        # nobody knows which test this process takes next, so every fixture is torn down
        runtestprotocol(item, nextitem=None)
        return True

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration
        if report.when == "teardown":
            signal.setitimer(signal.ITIMER_REAL, 0)

    def save(self) -> None:
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for file in targets():
            by_line = data.contexts_by_lineno(str(self.folder / file))
            lines[file] = {line: [c for c in found if c] for line, found in by_line.items()}
        out = {"seconds": self.seconds, "lines": lines}
        (self.share / f"map.{os.getpid()}").write_text(json.dumps(out))


def make_map(jobs: int, total: float, selection: list[str]) -> dict:
    """Per file and line, the tests that reach it, and the seconds of each test."""
    import pytest

    share, folders = Path(tempfile.mkdtemp(prefix="map-")), copies_of_library(jobs)
    until = time.time() + total

    def task(folder: Path) -> int:
        plugin = Mapper(share, folder, until)
        arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", MARKS, *selection]
        pytest.main(arguments, [plugin])
        plugin.save()
        return 0

    pids = [fork(folder, lambda folder=folder: task(folder)) for folder in folders]
    for pid in pids:
        os.waitpid(pid, 0)
    seconds: dict[str, float] = {}
    lines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in share.glob("map.*"):
        part = json.loads(path.read_text())
        seconds.update(part["seconds"])
        for file, found in part["lines"].items():
            for line, names in found.items():
                lines[file][line] += names
    if not seconds:
        sys.exit((folders[0] / "log").read_text())
    for folder in [share, *folders]:
        shutil.rmtree(folder)
    return {"seconds": seconds, "lines": lines}


def chosen_tests(mutant: Mutant, known: dict, budget: float) -> list[str]:
    """Tests that reach the mutant's lines, of all files in turn, the fastest first."""
    lines, seconds = known["lines"].get(mutant.file, {}), known["seconds"]
    reach = {
        t
        for n in range(mutant.line, mutant.last + 1)
        for t in lines.get(str(n), [])
        if t in seconds
    }
    if not reach:  # what runs at import, such as a default, is reached by no test in particular
        reach = {t for found in lines.values() for t in found if t in seconds}
        reach |= {t for t in seconds if "default" in t}
    by_file = defaultdict(list)
    for test in sorted(reach, key=lambda t: (seconds[t], t)):
        by_file[test.split("::")[0]].append(test)
    chosen, spent = [], 0.0
    for turn in range(max(map(len, by_file.values()), default=0)):
        for found in by_file.values():
            if turn < len(found) and spent + seconds[found[turn]] < budget:
                chosen.append(found[turn])
                spent += seconds[found[turn]]
    return chosen


def run_mutant(mutant: Mutant, folder: Path, chosen: list[str], budget: float) -> int:
    import pytest

    (folder / mutant.file).write_text(mutant.apply(source(mutant.file)))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", "-m", MARKS]

    def task() -> int:
        # of processor time, which does not depend on what else the machine does
        resource.setrlimit(resource.RLIMIT_CPU, (int(4 * budget + 30),) * 2)
        return int(pytest.main([*options, *chosen]))

    return fork(folder, task)


def run_all(
    sampled: list[Mutant], known: dict, jobs: int, budget: float, until: float
) -> Iterator[tuple[Mutant, str, float, int, str]]:
    """Each mutant with its fate, the seconds it took, and how many tests it was given."""
    folders = copies_of_library(jobs)
    waiting, running = sampled[::-1], {}
    while waiting or running:
        while waiting and folders and time.time() < until:
            mutant, folder = waiting.pop(), folders.pop()
            chosen = chosen_tests(mutant, known, budget)
            if not chosen:
                folders.append(folder)
                yield mutant, "survived", 0.0, 0, ""
                continue
            pid = run_mutant(mutant, folder, chosen, budget)
            running[pid] = mutant, folder, time.time(), len(chosen)
        if not running or time.time() > until + 60:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
            break
        for late, (*_, begun, _) in running.items():
            if time.time() - begun > 20 * budget + 60:  # it waits for something
                os.killpg(late, signal.SIGKILL)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.05)
            continue
        mutant, folder, begun, count = running.pop(pid)
        (folder / mutant.file).write_text(source(mutant.file))
        folders.append(folder)
        code = os.waitstatus_to_exitcode(status)
        # 1: a test failed; 2: the library or a test file could not even be imported
        fates = {0: "survived", 1: "killed", 2: "killed", -signal.SIGKILL: "timeout"}
        fate = fates.get(code, "error")
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-2:]
        yield mutant, fate, time.time() - begun, count, " | ".join(last)[-300:] if code else ""
    for folder in folders:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--count", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tests for a mutant")
    parser.add_argument("--map-total", type=float, default=1800.0, help="seconds for the first run")
    parser.add_argument("--total", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("mutation"))
    parser.add_argument("selection", nargs="*", help="test files to use instead of the usual ones")
    given = parser.parse_args()
    until = time.time() + given.total
    os.environ |= {"NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / "tests"))
    import hypothesis  # noqa: F401
    import jit_off  # noqa: F401
    import numba  # noqa: F401
    import numpy  # noqa: F401
    import scipy.optimize  # noqa: F401
    import torch._dynamo

    torch.set_num_threads(1)
    path = given.out.with_suffix(".map.json.gz")
    if path.exists():
        known = json.loads(gzip.decompress(path.read_bytes()))
    else:
        known = make_map(given.jobs, given.map_total, given.selection or tests())
        path.write_bytes(gzip.compress(json.dumps(known).encode()))
    print(f"{len(known['seconds'])} tests", flush=True)
    results, out = [], given.out.with_suffix(".json")
    if out.exists():
        results = json.loads(out.read_text())
    keys = {(r["file"], r["start"], r["after"]) for r in results}
    sampled = [m for m in sample(given.count, given.seed) if (m.file, m.start, m.after) not in keys]
    for mutant, fate, seconds, count, why in run_all(
        sampled, known, given.jobs, given.budget, until
    ):
        row = {
            "id": f"{mutant.file}:{mutant.start}",
            "fate": fate,
            "seconds": round(seconds, 1),
            "tests": count,
            "why": why,
        }
        results.append(asdict(mutant) | row)
        out.write_text(json.dumps(results, indent=1))
        if fate != "killed":
            print(f"{fate} {mutant.file}:{mutant.line} {mutant.before!r} -> {mutant.after!r}")
    fates = Counter(row["fate"] for row in results)
    dead = fates["killed"] + fates["timeout"]
    print(f"{dead} of {len(results)} mutants killed ({100 * dead / max(1, len(results)):.1f}%)")


if __name__ == "__main__":
    main()
