"""The tables and the report of a project: what of its configuration goes into them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from ddtree_bench.comparisons import Named
from ddtree_bench.config import Config
from ddtree_bench.figures import FIGURES
from ddtree_bench.load.tokenizer import Tokenizer, TokenizerError
from ddtree_bench.load.tokenizer_file import file_of
from ddtree_bench.metrics import Slos
from ddtree_bench.project import Project, git_commit
from ddtree_bench.records.files import sha256_file
from ddtree_bench.report import ReportContext, write_report
from ddtree_bench.table_rows import Counting
from ddtree_bench.tables import TABLES, Counted, TablesError, build_tables

SOFTWARE = ("snakemake", "pandas", "scipy", "seaborn", "matplotlib", "requests")


def make_tables(project: Project, views: Sequence[Path]) -> dict[str, pd.DataFrame]:
    """Return the tables of the views, with the comparisons that the configuration names beforehand."""
    slos = {name: Slos(**work.slos.model_dump()) for name, work in project.config.workloads.items() if work.slos}
    return build_tables(views, project.folders.store, named_comparisons(project.config), slos, _countings(project))


def _countings(project: Project) -> dict[Counted, Counting]:
    """The tokenizers of the planned servers' models. Raises TablesError when one cannot be read."""
    paths = {server: path for server in project.plan.servers if (path := project.tokenizer_path(server))}
    try:
        read = {path: Counting(Tokenizer.from_path(path), sha256_file(file_of(path))) for path in set(paths.values())}
    except TokenizerError as error:
        raise TablesError(f"models.<name>.tokenizer: {error}") from error
    return {(server.target, server.model.name, server.model.revision): read[path] for server, path in paths.items()}


def named_comparisons(config: Config) -> list[Named]:
    """Return the comparisons that a configuration names beforehand."""
    return [Named(c.method, c.baseline, c.budget, c.topk_cap, c.concurrency, c.rate) for c in config.comparisons]


def make_report(
    project: Project,
    tables: Mapping[str, pd.DataFrame],
    folder: Path,
    commands: Mapping[str, str],
    missing: Sequence[str] = (),
) -> Path:
    """Write `<folder>/report.html` about the tables and the figures of `folder` and return its path."""
    context = ReportContext(
        description=project.config.description,
        config_files=project.config_files,
        git_commit=git_commit(project.root),
        commands=commands,
        missing=missing,
        versions={"python": sys.version.split()[0], **{name: version(name) for name in SOFTWARE}},
    )
    stems = {name: folder / "figures" / name for name in FIGURES}
    return write_report(tables, stems, context, folder / "report.html")


def commands_of_all(project: Project) -> dict[str, str]:
    """Return the commands that make the results, and each table and figure of them, again."""
    results, snakemake = project.folders.results, snakemake_command(project)
    commands = {"everything": snakemake}
    commands |= {f"figures/{name}": f"{snakemake} --force {results}/figures/{name}.pdf" for name in FIGURES}
    commands |= {f"tables/{name}": f"{snakemake} --force {results}/tables/{name}.csv" for name in TABLES}
    return commands


def snakemake_command(project: Project) -> str:
    """Return the call of snakemake with the project's configuration."""
    return " ".join(["snakemake", *(f"--configfile {path}" for path in project.config_files), ""]).strip()
