"""The command line: `python -m benchmarks`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks import costs as steps
from benchmarks import culprits as blamed
from benchmarks import faults as worst
from benchmarks import guard as guards
from benchmarks import kept, report
from benchmarks import neighbours as beside
from benchmarks import processes as there
from benchmarks import stalled as deaf
from benchmarks.accounting import UnknownCostError, cores, precision
from benchmarks.against import COMPARED, WATCHED, Change, changed, prepare
from benchmarks.checkouts import CheckoutError, checkout, version
from benchmarks.comparison import Row, compare
from benchmarks.counts import ceilings as limits
from benchmarks.counts import command as exact
from benchmarks.load.connections import LoadError
from benchmarks.micro import GROUPS, purpose
from benchmarks.served import FLOOD
from benchmarks.servers import ROOT, ServerError
from benchmarks.units import Unit, measured
from benchmarks.workloads import WORKLOADS

T = TypeVar("T")

FAILURES = (ServerError, LoadError, UnknownCostError)
"""Errors that are printed as one line, without a traceback."""

_EPILOG = """
\b
Examples:
  python -m benchmarks list                          what can be measured
  python -m benchmarks micro                         every unit cost, about half a minute
  python -m benchmarks micro http1 websocket         some of them
  python -m benchmarks server unary-64               one workload: ours and its floors
  python -m benchmarks server --json all.json        every workload, about five minutes
  python -m benchmarks against HEAD^                 has a change made it dearer than another commit
  python -m benchmarks against release --keep        the same since the last release, into its page
  python -m benchmarks guard                         are we still near the floors
  python -m benchmarks counts                        has a unit of work one call or allocation more
  python -m benchmarks costs JSON                    the longest step of each call that grows with a message
  python -m benchmarks neighbours resets             what a good client waits beside a bad one
  python -m benchmarks processes unary               what a process of its own costs a call
  python -m benchmarks faults crash                  what everybody has of a model that crashes in its process
  python -m benchmarks culprits                      does the server say who is slow, and how soon
  python -m benchmarks stalled http1                 memory beside clients that stop reading

\b
How to read it: figures are CPU time of the server for each unit of work, as the kernel counts it,
medians of several rounds in which the servers take turns. Compare within one run; the column
"x floor" is what survives a change of machine. Rates depend on what else the machine does.
"""


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def program() -> None:
    """Measure the cost of everywire on any machine, with nothing but its own dependencies.

    `micro` measures machines and codecs alone. `server` starts the real server, and bare floors beside it, on the loopback
    interface, with its own load client. `guard` fails if a ratio to a floor has grown beyond its bound.
    """


@program.command("list", short_help="Print what can be measured.")
def list_all() -> None:
    """Print the groups of `micro`, the workloads of `server`, and which of them `guard` watches."""
    groups = [(name, purpose(group)) for name, group in GROUPS.items()]
    click.echo(report.table(("micro", "what is measured"), groups, left=2))
    click.echo()
    rows = [(name, w.what, w.figure, w.servers[1].name, _bound(name)) for name, w in WORKLOADS.items()]
    click.echo(report.table(("server", "what the load does", "figure", "floor", "guard"), rows, left=5))
    click.echo()
    servers = {server.name: server.what for workload in WORKLOADS.values() for server in workload.servers}
    click.echo(report.table(("servers", "what they are"), servers.items(), left=2))


def _bound(name: str) -> str:
    bound = guards.BOUNDS.get(name)
    return "" if bound is None else f"at most {bound.most:g} x {bound.floor.name}"


_json = click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False, writable=True), metavar="FILE",
    help="Write every figure there, too.",
)  # fmt: skip


@program.command(short_help="Unit costs of machines and codecs.")
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@_json
def micro(names: tuple[str, ...], file: Path | None) -> None:
    """Print CPU microseconds of single steps: ours, and floors that do the same. All groups, or those of NAMES."""
    units: list[Unit] = []
    for name, group in _chosen(names, GROUPS, "group").items():
        click.echo(f"measuring {name}", err=True)
        units += [measured(name, case) for case in group()]
    click.echo(report.units_table(units))
    if file is not None:
        _write(file, micro=report.units_as_json(units))


@program.command(short_help="The whole server beside bare floors.")
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@click.option("--seconds", type=click.FloatRange(0.05, 600), default=2.0, show_default=True, help="Length of a round.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Rounds of each server.")
@_json
def server(names: tuple[str, ...], seconds: float, rounds: int, file: Path | None) -> None:
    """Start `python -m gateway` and the floors of each workload, keep them busy in turns, and print what each cost. All
    workloads, or those of NAMES."""
    chosen = _chosen(names, WORKLOADS, "workload")
    _explain()
    rows: list[Row] = []
    failures: list[str] = []
    for name, workload in chosen.items():
        click.echo(f"measuring {name}", err=True)
        try:
            rows += compare(workload, seconds=seconds, rounds=rounds, note=_note)
        except FAILURES as error:
            failures.append(str(error))
            _note(f"{name} failed")
    if rows:
        click.echo(report.servers_table(rows))
    for warning in report.warnings(rows):
        _note(warning)
    if file is not None:
        _write(file, seconds=seconds, rounds=rounds, server=report.rows_as_json(rows), failures=failures)
    if failures:
        raise click.ClickException("\n".join(failures))


@program.command(short_help="Fail when we have become dear beside the floors.")
def guard() -> None:
    """Measure a few workloads shortly and fail, with exit status 1, if the ratio to the floor of the same run is above its
    bound in benchmarks/guard.py. Takes about 20 seconds; a workload that fails is measured once more."""
    _explain()
    try:
        verdicts = list(guards.judge())
    except FAILURES as error:
        raise click.ClickException(str(error)) from None
    click.echo(report.verdicts_table(verdicts))
    dear = [verdict.workload for verdict in verdicts if not verdict.holds]
    if dear:
        raise click.ClickException(f"beyond the bound in two measurements: {', '.join(dear)}")


@program.command(short_help="Fail when a unit of work has become dearer by one call.")
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@click.option("--write", is_flag=True, help="Lower the ceilings that are above what was counted, and add new ones.")
@click.option("--raise", "raised", is_flag=True, help="With --write: raise ceilings too.")
@_json
def counts(names: tuple[str, ...], write: bool, raised: bool, file: Path | None) -> None:
    """Count what a unit of each workload costs, or of those of NAMES: calls and modules of ours, changes of room, bytecodes,
    allocations, their bytes, system calls; and the CPU of a unit among eight times as many beside one among few. Fail, with
    exit status 1, if a count is above its ceiling in benchmarks/counts/ceilings.json. Ceilings hold for one interpreter and
    the versions of benchmarks/requirements-counts.txt; elsewhere the counts are only printed. Python 3.12 or newer."""
    chosen = list(_chosen(names, exact.CASES, "workload"))
    strange = limits.elsewhere()
    if write and strange:
        raise click.ClickException(f"ceilings are written in their own environment: {strange}")
    most = limits.ceilings()
    note = partial(click.echo, err=True)
    try:
        found = list(exact.found(chosen, None, note)) if write or strange else exact.least(chosen, most, note)
    except exact.CountsError as error:
        raise click.ClickException(str(error)) from None
    click.echo(report.table(exact.HEADS, [exact.cells(one) for one in found], left=2))
    if all(one.instructions is None for one in found):
        _note("instructions: the kernel or this machine does not count them")
    by_case = {one.case: one.counts for one in found}
    if file is not None:
        _write(file, counts=[asdict(one) for one in found])
    if strange:
        _note(f"no ceiling holds here: {strange}")
        return
    if write:
        most = limits.written(by_case, most, raised=raised)
        limits.write(most)
    faults = [str(rise) for rise in limits.rises(by_case, most)]
    faults += [f"{one.case}: no ceiling; `python -m benchmarks counts --write`" for one in found if one.case not in most]
    faults += [
        f"{one.case}: a {exact.CASES[one.case].unit} among eight times as many costs {one.growth:.2f} times as much CPU, of "
        f"{limits.GROWTH:g} allowed: something grows with their number"
        for one in found
        if one.grows
    ]
    if faults:
        raise click.ClickException("\n".join(("above the ceilings:", *faults, exact.WHAT_TO_DO)))


@program.command(short_help="The longest step of each call that grows with a message.")
@click.argument("words", nargs=-1, metavar="[WORDS]...")
@click.option("--write", is_flag=True, help="Write the table into docs/explanation/costs.md.")
@_json
def costs(words: tuple[str, ...], write: bool, file: Path | None) -> None:
    """Print the CPU milliseconds of the longest step of each call that grows with a message, at its limit and with the
    worst input that is known: at most 1 ms on the loop, at most 50 ms in a thread. All calls, or those whose name has all
    of WORDS. Takes about a minute, and 1 GiB of memory. Fails, with exit status 1, if a step is above its bound."""
    if write and words:
        raise click.UsageError("--write is for the whole table")
    _explain()
    found: list[tuple[steps.Step, float]] = []
    beside = steps.floor()
    for step in steps.steps():
        if all(word in step.call for word in words):
            found.append((step, steps.measured(step)))
    beside = min(beside, steps.floor())
    click.echo(report.table(steps.HEADS, [steps.cells(*one) for one in found], left=3))
    _note(f"the floor, work that depends on the machine alone, takes {beside:.2f} ms; that of the bounds {steps.FLOOR:g}")
    if file is not None:
        rows = [dict(zip(steps.HEADS, steps.cells(*one), strict=True)) for one in found]
        _write(file, floor=beside, costs=rows)
    if write:
        steps.write(found)
    dear = [step.call for step, spent in found if not steps.holds(step, spent, beside)]
    if dear:
        raise click.ClickException(f"above the bound: {', '.join(dear)}")


@program.command(short_help="This checkout beside another version, in turns.")
@click.argument("commit")
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@click.option("--seconds", type=click.FloatRange(0.05, 600), default=1.0, show_default=True, help="Length of a round.")
@click.option("--rounds", type=click.IntRange(1, 100), default=15, show_default=True, help="Rounds of each.")
@click.option("--keep", is_flag=True, help="Write the table into docs/reference/against-release.md.")
@_json
def against(commit: str, names: tuple[str, ...], seconds: float, rounds: int, keep: bool, file: Path | None) -> None:
    """Run the server of COMMIT and that of this checkout in turns, and print the cost of the change: the median of all
    pairs of rounds, and the distance between their quartiles, in percent. COMMIT is a commit, a tag or a branch, for which
    git makes a worktree that is removed afterwards; `release` for the last release; or a folder with a checkout. Without
    NAMES, runs the workloads that a change must not make more expensive, in about a quarter of an hour."""
    if keep and (names or commit != "release"):
        raise click.UsageError("--keep is for the whole table against `release`: give no NAMES, and no other COMMIT")
    chosen = tuple(_chosen(names, COMPARED, "workload")) if names else WATCHED
    load = round(os.getloadavg()[0], 2)
    rows: list[Change] = []
    failures: list[str] = []
    try:
        with checkout(commit) as folder:
            there, here = version(folder) or str(folder), version(ROOT) or str(ROOT)
            _explain()
            click.echo(f"there: {there}; here: {here}", err=True)
            prepare(folder)
            for name in chosen:
                click.echo(f"measuring {name}", err=True)
                try:
                    rows.append(changed(folder, name, seconds=seconds, rounds=rounds))
                except FAILURES as error:
                    failures.append(str(error))
                    _note(f"{name} failed")
    except CheckoutError as error:
        raise click.ClickException(str(error)) from None
    click.echo(report.changes_table(rows))
    if file is not None:
        of_run: dict[str, Any] = {"seconds": seconds, "rounds": rounds, "there": there, "here": here, "load_average": load}
        _write(file, **of_run, against=[asdict(row) for row in rows], failures=failures)
    if failures:
        raise click.ClickException("\n".join(failures))
    if keep:
        kept.write(rows, there=there, here=here, seconds=seconds, rounds=rounds, load=load)


@program.command(short_help="Measure how long a good client waits beside a bad one.")
@click.argument("names", nargs=-1, metavar="[LOADS]...")
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=10.0, show_default=True, help="Length of each load.")
@click.option("--connections", type=click.IntRange(0, 100), default=1, show_default=True, help="Connections of the load.")
@_json
def neighbours(names: tuple[str, ...], seconds: float, connections: int, file: Path | None) -> None:
    """Keep `python -m gateway` as busy as one client can, and print how long another one waits for its answers, in
    milliseconds, on a connection that it keeps and on fresh ones. All loads, or those of LOADS. Fails, with exit status 1,
    where the 99th percentile is above the bound of benchmarks/neighbours.py."""
    rows: list[beside.Waits] = []
    for name in _chosen(names, beside.LOADS, "load"):
        click.echo(f"measuring {name}", err=True)
        try:
            rows += beside.measure(name, seconds, connections)
        except FAILURES as error:
            raise click.ClickException(str(error)) from None
    click.echo(report.waits_table(rows))
    if file is not None:
        _write(file, seconds=seconds, neighbours=[asdict(row) for row in rows])
    slow = [f"{row.load} ({row.connection})" for row in rows if row.p99 > beside.LIMIT]
    if slow:
        raise click.ClickException(f"p99 above {beside.LIMIT * 1000:g} ms beside {', '.join(slow)}")


@program.command(short_help="Break models in processes of their own, one at a time.")
@click.argument("names", nargs=-1, metavar="[FAULTS]...")
@_json
def faults(names: tuple[str, ...], file: Path | None) -> None:
    """Serve models in processes that crash, are killed, hold the interpreter, cannot be stopped or take memory without end,
    one at a time beside 100 streams of other models, and print what became of each and how long `/ping` waited. All of them,
    or FAULTS. Linux only."""
    chosen = list(_chosen(names, worst.FAULTS, "fault"))
    _explain()
    try:
        rows = worst.measure(chosen, lambda text: click.echo(text, err=True))
    except FAILURES as error:
        raise click.ClickException(str(error)) from None
    click.echo(report.table(worst.HEADS, [worst.cells(row) for row in rows], left=2))
    if file is not None:
        _write(file, faults=[asdict(row) for row in rows])
    lost = [row.fault for row in rows if row.lost]
    if lost:
        raise click.ClickException(f"streams of other models were lost beside {', '.join(lost)}")


@program.command(short_help="Does the server say who is slow, and how soon.")
@click.argument("names", nargs=-1, metavar="[LOADS]...")
@_json
def culprits(names: tuple[str, ...], file: Path | None) -> None:
    """Serve models with an operator plane, make loads that have one culprit each (clients that do not read, a full queue, a
    model that fails, a model that blocks the event loop), and print after how many seconds the verdict of `/stats` names it.
    All loads, or LOADS; under 40 seconds each. Fails, with exit status 1, where a culprit is not named."""
    rows: list[blamed.Told] = []
    for name in _chosen(names, blamed.LOADS, "load"):
        click.echo(f"measuring {name}", err=True)
        try:
            rows.append(blamed.measure(name))
        except (*FAILURES, OSError) as error:
            raise click.ClickException(f"{name}: {error}") from None
    click.echo(report.table(blamed.HEADS, [blamed.cells(row) for row in rows], left=len(blamed.HEADS)))
    if file is not None:
        _write(file, culprits=[asdict(row) for row in rows])
    unnamed = [row.load for row in rows if not row.named]
    if unnamed:
        raise click.ClickException(f"the verdict does not name the culprit of {', '.join(unnamed)}")


@program.command(short_help="Memory beside clients that stop reading.")
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@click.option(
    "--readers", type=click.IntRange(0, 10_000), multiple=True, default=deaf.READERS, show_default=True,
    help="Number of clients at a measurement; give it several times.",
)  # fmt: skip
@_json
def stalled(names: tuple[str, ...], readers: tuple[int, ...], file: Path | None) -> None:
    """Open more and more clients that ask for a long answer, read its head and then nothing, and print the memory of the
    server with its processes. All of `http1`, `http2` (the gateway), `uvicorn` and `litserve` (others, if they are
    installed), or NAMES. Under three minutes. Linux only."""
    _explain()
    load = round(os.getloadavg()[0], 2)
    found: list[deaf.Series] = []
    for name, case in _chosen(names, deaf.CASES, "server").items():
        if case.missing:
            _note(f"without {name}: {case.missing}")
            continue
        click.echo(f"measuring {name}: {case.what}", err=True)
        try:
            found.append(deaf.measure(name, readers))
        except (*FAILURES, OSError) as error:
            raise click.ClickException(f"{name}: {error}") from None
    click.echo(report.table(deaf.HEADS, [row for series in found for row in deaf.cells(series)], left=2))
    if file is not None:
        answer = {"tokens": deaf.TOKENS, "characters": len(FLOOD)}
        series = [asdict(one) | {"each": one.each} for one in found]
        date = time.strftime("%Y-%m-%d")
        _write(file, date=date, load_average=load, capacity=deaf.CAPACITY, answer=answer, series=series)


@program.command(short_help="What a process of its own costs a model.")
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=1.0, show_default=True, help="Length of a round.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="Rounds of each.")
@_json
def processes(names: tuple[str, ...], seconds: float, rounds: int, file: Path | None) -> None:
    """Serve the same model in the gateway's process and in a process of its own, and print the CPU of each; then how long
    echoes, cancellations and the news of an end take, what a process has of memory, and what two of them do on two cores.
    All of it, or NAMES. Linux only."""
    known = dict.fromkeys((*there.CASES, *there.TIMES))
    chosen = list(_chosen(names, known, "case"))
    _explain()
    costs: list[there.Cost] = []
    times: list[tuple[str, str]] = []
    try:
        for name in chosen:
            click.echo(f"measuring {name}", err=True)
            if name in there.CASES:
                costs.append(there.cost(there.CASES[name], seconds=seconds, rounds=rounds))
            else:
                times += there.TIMES[name]()
    except FAILURES as error:
        raise click.ClickException(str(error)) from None
    if costs:
        click.echo(report.table(there.COST_HEADS, [there.cost_cells(row) for row in costs], left=2))
    if times:
        click.echo(report.table(("what", "figure"), times, left=2))
    if file is not None:
        _write(file, costs=[asdict(row) for row in costs], times=times)


def _chosen(names: Iterable[str], known: Mapping[str, T], what: str) -> dict[str, T]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"no {what} is called {unknown[0][:100]!r}; there are: {', '.join(known)}")
    return {name: known[name] for name in names} or dict(known)


def _explain() -> None:
    machine = report.machine()
    click.echo(f"{machine['processor']}, {machine['cores']} cores, {machine['python']}, {machine['system']}", err=True)
    pinned = cores()
    where = "not pinned: this platform or this machine has no core for each"
    if pinned is not None:
        where = f"servers on core {pinned[0]}, load on core {pinned[1]}"
    click.echo(f"{precision()}; {where}", err=True)


def _note(text: str) -> None:
    click.echo(f"note: {text}", err=True)


def _write(file: Path, **content: Any) -> None:
    try:
        report.write_json(file, **content)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from None
