"""The command line: ``structmax train TASK``, then ``evaluate``, ``predict`` and ``show`` the run.

Exit codes: 0, all went well; 1, something is broken; 2, something to fix on the command line or in
the input, said in one line; 130 and 143, ended by Ctrl-C or SIGTERM after saving.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from structmax import __version__
from structmax.data.folder import LONGEST_LINE, DataWarning, find_data
from structmax.train import run as runs
from structmax.train import tasks
from structmax.train.config import TrainConfig, cpu_defaults, from_dict, read_toml, types_of
from structmax.train.errors import TOO_LARGE, UserError, as_user_error, is_out_of_memory, near
from structmax.train.metrics import to_json
from structmax.train.signals import Stopped


class Commands(TyperGroup):
    """Commands by name; of one that is not there, the error says what there is."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise UserError(f"there is no command {args[0]!r}. {near(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="structmax",
    cls=Commands,
    help="Train models with latent structure, and show what they learned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(
    cls=Commands,
    help="Train the model of a task. Under torchrun: on many workers.",
    no_args_is_help=True,
)
app.add_typer(train_app, name="train")


def _version(asked: bool) -> None:
    if asked:
        _print(f"structmax {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train models with latent structure, and show what they learned."""


Run = Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")]
Name = Annotated[str | None, typer.Argument(help="The one to show in full.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]


# -- train ----------------------------------------------------------------------------------------


def _train(name: str, run: Path, config: Path | None, start: str, changes: dict[str, Any]) -> None:
    from structmax.train.distributed import choose_device, restarted, workers

    task = tasks.by_name(name)
    there, resume = runs.exists(run), start == "resume" or restarted()
    options = read_toml(config) if config else {}
    if there and resume:
        kept, _ = runs.read(run)
        if kept.name != name:
            raise UserError(f"{run} is a run of task {kept.name!r}, not of {name!r}.")
        options = {**read_toml(run / "config.toml"), **options}
    elif there and start == "new":
        raise UserError(f"{run} holds a run already. Add --resume, or --fresh to start again.")
    elif not there and start != "fresh" and not restarted():  # which may have died as it began
        runs.refuse_other_files(run)
    source = str(config) if config else f"task {name}"
    device = {"device": TrainConfig.device, **options, **changes}["device"]
    if not there or not resume:
        on_cpu = isinstance(device, str) and choose_device(device).type == "cpu"
        options = {**(cpu_defaults(task.config) if on_cpu else {}), **options}
    settings = from_dict(task.config, {**options, **changes}, source=source)
    if "data" in changes:
        settings.check_data()
    with workers(settings.device) as crew:
        result = task.fit(settings, run, resume, crew)
        if crew.first:
            _print(to_json(result, indent=1))


def _train_command(name: str) -> Callable[..., None]:
    """The command of one task, with a flag for every option of its configuration."""
    cls = type(tasks.by_name(name)).config
    kind = inspect.Parameter.KEYWORD_ONLY

    def parameter(name: str, of: Any, default: Any, help: str, panel: str) -> inspect.Parameter:
        only = [f"--{name}"] if panel == "Run" else []  # no --no-…
        option = typer.Option(*only, help=help, rich_help_panel=panel)
        return inspect.Parameter(name, kind, default=default, annotation=Annotated[of, option])

    own = [
        # not --run, which torchrun takes for the beginning of one of its own
        parameter("out", str, f"runs/{name}", "The folder of the run.", "Run"),
        parameter("config", Path | None, None, "Options in TOML; flags override them.", "Run"),
        parameter(
            "resume", bool, False, "Continue from the last checkpoint, if there is one.", "Run"
        ),
        parameter(
            "fresh", bool, False, "Start again; an earlier run in the folder is lost.", "Run"
        ),
    ]
    common = {f.name for f in fields(TrainConfig)}
    listed = [
        parameter(
            f.name, hint, f.default, f.metadata["help"], "Training" if f.name in common else "Task"
        )
        for f, hint in zip(fields(cls), types_of(cls).values())
    ]

    def command(ctx: typer.Context, **given: Any) -> None:
        out, config, resume, fresh = (given.pop(p.name) for p in own)
        if resume and fresh:
            raise UserError("--resume and --fresh exclude each other.")
        if not out:
            raise UserError("--out is empty. Give the name of a folder.")
        start = "resume" if resume else "fresh" if fresh else "new"
        asked = {k: v for k, v in given.items() if _was_given(ctx, k)}
        _train(name, Path(out), config, start, asked)

    first = inspect.Parameter("ctx", kind, annotation=typer.Context)
    command.__doc__ = inspect.getdoc(tasks.by_name(name))
    command.__signature__ = inspect.Signature([first, *own, *listed])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [first, *own, *listed]}
    return command


def _was_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


for _name in tasks.names():
    train_app.command(_name)(_train_command(_name))


# -- a run ----------------------------------------------------------------------------------------


@app.command()
def evaluate(
    ctx: typer.Context,
    run: Run,
    split: Annotated[
        Literal["valid", "test"], typer.Option(help="The split to measure on.")
    ] = "test",
    file: Annotated[
        str | None, typer.Option(help="Measure on this file instead, in the corpus's format.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder of data sets, if it has moved.")] = None,
    device: Device = "auto",
) -> None:
    """Measure a run's best weights; prints JSON."""
    from structmax.train.distributed import workers
    from structmax.train.measure import measure

    if file is not None and _was_given(ctx, "split"):
        raise UserError("--file and --split exclude each other.")
    with workers(device) as crew:
        trained = runs.load(run, crew.device)
        config = trained.config
        if data is not None:
            if not hasattr(config, "data"):
                raise UserError(f"task {trained.task.name} reads no data sets. Leave out --data.")
            moved: dict[str, Any] = {"data": data}
            config = replace(config, **moved)
            config.check_data()
        if file is None:
            source: dict[str, str] = {"split": split}
            examples = getattr(runs.data(run, trained.task, config), split)
        else:
            source = {"file": file}
            with as_user_error():
                path = find_data(file, getattr(config, "data", None))
                examples = trained.task.read(path, config)
        if not len(examples):
            what = (
                f"{file} has no examples"
                if file
                else f"task {trained.task.name} has no {split} split here"
            )
            raise UserError(f"{what}.")
        found = measure(trained.task, trained.model, examples, trained.config, crew)
        if crew.first:
            result = {"task": trained.task.name, "step": trained.step, **source, **found}
            _print(to_json(result, indent=1))


@app.command()
def predict(
    run: Run,
    file: Annotated[
        Path | None, typer.Argument(help="Input, one example per line; - or none: stdin.")
    ] = None,
    format: Annotated[
        Literal["text", "json"], typer.Option(help="What to print per line.")
    ] = "text",
    device: Device = "auto",
) -> None:
    """Print the structure of every line of input as it comes; of an empty line, an empty line."""
    trained = _load(run, device)
    for found in _predictions(trained, _lines(file), str(file or "stdin"), format == "json"):
        if found is None:
            _print("")
        else:
            _print(to_json(found, ensure_ascii=False) if format == "json" else found["text"])


@app.command()
def show(
    run: Run,
    file: Annotated[
        Path | None, typer.Argument(help="Input, one example per line; -: stdin.")
    ] = None,
    count: Annotated[
        int, typer.Option(min=1, help="How many examples of the validation split.")
    ] = 3,
    html: Annotated[Path | None, typer.Option(help="Also write a page of pictures.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also write SVG files into a folder.")] = None,
    device: Device = "auto",
) -> None:
    """Draw what a run's model finds, in the terminal and as pictures."""
    from structmax.draw import answer_svg, page, tree_text
    from structmax.train.checkpoint import write_atomic

    trained = _load(run, device)
    if file is None:
        splits = runs.data(run, trained.task, trained.config)
        examples = splits.valid or splits.test  # align chooses within the training series
        chunks = iter([[trained.task.line(example) for example in examples[:count]]])
    else:
        chunks = _lines(file)
    pictures, anything = [], False
    source, drawing = str(file or "the validation split"), bool(html or svg)
    for found in _predictions(trained, chunks, source, drawing):
        if found is None:
            continue
        anything = True
        _print(found["text"])
        if "spans" in found:
            _print(tree_text(found["words"], found["spans"]) + "\n")
        if drawing and (drawn := answer_svg(found)) is not None:
            pictures.append((found["text"], drawn))
    if drawing and not pictures:
        what = "what this task predicts" if anything else "no lines"
        raise UserError(f"there is nothing to draw in {what}.")
    with as_user_error():
        if html:
            html.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(html, page(f"{run}", pictures).encode())
        if svg:
            svg.mkdir(parents=True, exist_ok=True)
            for number, (_, drawn) in enumerate(pictures):
                write_atomic(svg / f"{number}.svg", drawn.encode())


def _print(text: str) -> None:
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write the output: {error.strerror}.") from error


def _lines(file: Path | None) -> Iterator[list[str]]:
    """The lines of a UTF-8 file or of standard input, as many at a time as have come."""
    given = None if file is None or str(file) == "-" else file
    with as_user_error(), contextlib.ExitStack() as opened:
        if given is not None:
            stream: Any = opened.enter_context(given.open("rb"))
        elif sys.stdin is None:  # it may have been closed
            return
        else:
            stream = sys.stdin.buffer
        rest, number, more = b"", 0, True
        while more:
            chunk = stream.read1(1 << 16)  # waits for something, not for all of it
            more = bool(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            if rest and not more:  # a last line without an end
                lines = [rest]
            found: list[str] = []
            for line in lines:
                number += 1
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    yield found
                    place = f"{given or 'stdin'}, line {number}"
                    raise ValueError(f"{place}: this is not text in UTF-8: {error}.") from None
                found.append(text.removesuffix("\r"))
            yield found
            if len(rest) > LONGEST_LINE:
                place = f"{given or 'stdin'}, line {number + 1}"
                raise ValueError(f"{place}: a line of more than {LONGEST_LINE} bytes.")


def _load(run: Path, device: str) -> runs.Trained:
    from structmax.train.distributed import choose_device

    return runs.load(run, choose_device(device))


def _predictions(
    trained: runs.Trained, chunks: Iterable[Sequence[str]], source: str, details: bool
) -> Iterator[dict[str, Any] | None]:
    """The answer to each line of some chunks of lines, None to an empty one.

    ``details``: with all that JSON and pictures show.
    """
    import torch

    task, model, number = trained.task, trained.model, 0
    for lines in chunks:
        empty = [not line.strip(" \t\r\n") for line in lines]
        answers = task.predict(model, [line for line, no in zip(lines, empty) if not no])
        for no in empty:
            number += 1
            if no:
                yield None
                continue
            try:
                with torch.no_grad(), as_user_error():
                    found = next(answers)
                    if details:
                        found = {**found, **task.details(model, found)}
            except UserError as error:
                raise UserError(f"{source}, line {number}: {error}") from error
            yield found


# -- looking ---------------------------------------------------------------------------------------


@app.command()
def explore(
    page: Annotated[str, typer.Option(help="The page to open first.")] = "structures",
    run: Annotated[Path | None, typer.Option(help="A run, for the page of a model.")] = None,
    port: Annotated[
        int | None, typer.Option(help="The port to listen at; 0 or none: a free one.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Move scores in the browser and watch the answers: a page on this machine, behind a token."""
    from structmax.explore.serve import serve

    serve(port, page, run, browser)


# -- what there is --------------------------------------------------------------------------------


@app.command("tasks")
def list_tasks() -> None:
    """List the tasks."""
    _table([(name, _summary(tasks.by_name(name))) for name in tasks.names()])


@app.command()
def structures(
    name: Name = None,
) -> None:
    """List the structures, or show one."""
    import structmax as sx

    found = {
        key: value
        for key, value in vars(sx).items()
        if isinstance(value, type) and issubclass(value, sx.Structure) and value is not sx.Structure
    }
    _list_or_show("structure", found, name)


@app.command()
def estimators(
    name: Name = None,
) -> None:
    """List the estimators, or show one."""
    from structmax.estimators import NAMES

    _list_or_show("estimator", NAMES, name)


def _list_or_show(kind: str, found: dict[str, Any], name: str | None) -> None:
    if name is None:
        return _table([(key, _summary(value)) for key, value in sorted(found.items())])
    if name not in found:
        raise UserError(f"there is no {kind} {name!r}. {near(name, found)}")
    _print(f"{name}\n\n{_plain_doc(found[name])}")


def _plain_doc(value: Any) -> str:
    """A docstring without its marks of names and code."""
    return re.sub(r"(?::\w+)+:`~?([^`]*)`", r"\1", inspect.getdoc(value) or "").replace("``", "")


def _summary(value: Any) -> str:
    """The first paragraph, on one line. What a list would follow ends here."""
    return re.sub(":$", ".", " ".join(_plain_doc(value).partition("\n\n")[0].split()))


def _table(rows: list[tuple[str, str]]) -> None:
    wide = max(len(name) for name, _ in rows)
    for name, text in rows:
        _print(f"{name.ljust(wide)}  {text}")


@app.command()
def doctor() -> None:
    """Check the installation: versions, GPU, and that kernels compile and agree."""
    from structmax.doctor import examine

    rows = examine()
    _table([(name, text) for name, text, _ in rows])
    if not all(well for _, _, well in rows):
        raise typer.Exit(1)


# -- running --------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    if hasattr(sys.stdout, "reconfigure"):  # a file is read as UTF-8 again, whatever the locale
        terminal = sys.stdout.isatty()
        sys.stdout.reconfigure(
            encoding=None if terminal else "utf-8", errors="replace" if terminal else "strict"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("always", DataWarning)
        warnings.showwarning = _warn
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
    try:
        if sys.stdout is not None:  # it may have been closed
            sys.stdout.flush()
    except OSError:  # what was not written would be tried again as the process ends, and fail
        with contextlib.suppress(OSError):  # an output that is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code


def _run(args: list[str]) -> int:
    try:
        result = app(args, prog_name="structmax", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except UserError as error:
        return _refuse(str(error))
    except typer.TyperException as error:  # usage: unknown commands, flags, wrong values
        return _refuse(error.format_message())
    except Stopped as stopped:
        told = f"{stopped}; its checkpoint is saved. Add --resume to continue."
        typer.echo(f"structmax: {told}", err=True)
        return 128 + stopped.number
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # who read the output has read enough
        return 1
    except OSError as error:  # a file that may not be read or written
        return _refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _refuse(TOO_LARGE)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    if issubclass(category, DataWarning):
        if os.environ.get("RANK", "0") == "0":  # of several workers
            typer.echo(f"structmax: {message}", err=True)
    else:
        text = warnings.formatwarning(message, category, filename, lineno)
        typer.echo(text, err=True, nl=False)


def _refuse(message: str) -> int:
    if message:  # none where the help was printed instead
        typer.echo(f"structmax: {' '.join(message.split())}", err=True)
    return 2
