"""Write the report: the answer first, then figures, tables, failures, what is missing, and how to make it again."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from ddtree_bench import __version__
from ddtree_bench.columns import ABOUT
from ddtree_bench.figures import FIGURES
from ddtree_bench.figures.style import SINGLE_COLUMN
from ddtree_bench.report import content


@dataclass(frozen=True)
class ReportContext:
    """What the report says beside tables and figures.

    Attributes
    ----------
    title, description : str
        Heading, and the configuration's own description ("" for none).
    config_files : tuple of str
        The configuration files, in the order in which they were merged.
    git_commit : str or None
        Commit of the repository when the page is written; None when it is not known.
    made_at : str or None
        When the report was made, ISO 8601; None leaves it out, so that the same input gives the same page.
    commands : mapping of str to str
        What to make again from the store (`everything`, `figures/<name>`, `tables/<name>`: some names are both) and
        the exact command.
    missing : sequence of str
        Cells of the plan that the tables lack; not empty for a partial report.
    versions : mapping of str to str
        Software and its versions.
    tables_folder, figures_folder : str
        Where the CSV and figure files lie, relative to the page.
    """

    title: str = "DDTree benchmark"
    description: str = ""
    config_files: tuple[str, ...] = ()
    git_commit: str | None = None
    made_at: str | None = None
    commands: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    tables_folder: str = "tables"
    figures_folder: str = "figures"


def write_report(
    tables: Mapping[str, pd.DataFrame], figures: Mapping[str, Path], context: ReportContext, path: Path
) -> Path:
    """Write the report to `path` and return it. The page needs no network and no script.

    Paths below the working folder, which is that of the repository, are shown relative to it.

    Parameters
    ----------
    tables : mapping of DataFrame
        As from `build_tables` or `read_tables`.
    figures : mapping of str to path
        A figure's name in `FIGURES` and its stem: `<stem>.svg` is embedded.
    context : ReportContext
        All else that the page says.

    Raises
    ------
    KeyError
        A figure that `FIGURES` does not name.
    FileNotFoundError
        A figure's SVG is absent.
    """
    context = _with_relative_paths(context, Path.cwd())
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ddtree_bench.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        context=context,
        version=__version__,
        summary=content.summary(tables),
        answers=content.answers(tables),
        figures=[_figure(name, stem, context) for name, stem in figures.items()],
        tables=[_table(name, tables[name], context) for name in tables],
        failures=content.failures(tables["cells"]),
        hosts=content.hosts(tables["runs"]),
        servers=content.servers(tables["cells"]),
        starts=content.starts(tables["runs"]),
        plan_keys=content.plan_keys(tables["cells"]),
        commits=content.commits(tables["cells"]),
        measure_anew=_measure_anew(context.config_files),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _with_relative_paths(context: ReportContext, folder: Path) -> ReportContext:
    below = re.compile(rf"(?<!\S){re.escape(str(folder))}/")
    return replace(
        context,
        config_files=tuple(below.sub("", file) for file in context.config_files),
        commands={name: below.sub("", command) for name, command in context.commands.items()},
    )


def _measure_anew(config_files: Sequence[str]) -> str:
    """The call that finds nothing measured, since its store is empty."""
    overlays = "".join(f" --configfile {file}" for file in config_files)
    return f"DDTREE_BENCH_STORE=NEW_FOLDER snakemake{overlays}"


def _figure(name: str, stem: Path, context: ReportContext) -> dict[str, Any]:
    figure = FIGURES[name]
    svg = stem.with_name(f"{stem.name}.svg").read_bytes()
    image = base64.b64encode(svg).decode()
    return {
        "name": name,
        "title": figure.title,
        "caption": figure.caption,
        "width": "double" if _width_in(svg) > 1.2 * SINGLE_COLUMN else "single",
        "data": f"data:image/svg+xml;base64,{image}",
        "files": {
            suffix.upper(): f"{context.figures_folder}/{stem.name}.{suffix}" for suffix in ("pdf", "png", "svg", "csv")
        },
        "command": context.commands.get(f"figures/{name}"),
    }


def _width_in(svg: bytes) -> float:
    found = re.search(rb'<svg[^>]* width="([0-9.]+)pt"', svg)
    return float(found.group(1)) / 72 if found else SINGLE_COLUMN


def _table(name: str, frame: pd.DataFrame, context: ReportContext) -> dict[str, Any]:
    return {
        "name": name,
        "about": ABOUT[name],
        "rows": len(frame),
        "columns": len(frame.columns),
        "file": f"{context.tables_folder}/{name}.csv",
        "command": context.commands.get(f"tables/{name}"),
    }
