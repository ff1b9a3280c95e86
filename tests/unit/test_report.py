"""The report: one file, nothing from outside, nothing left out, everything escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from store_factory import DEMO, Simulation, make_results

from ddtree_bench import tables
from ddtree_bench.comparisons import Named
from ddtree_bench.figures import FIGURES
from ddtree_bench.report import ReportContext, content, write_report
from ddtree_bench.report.content import ranged

EVIL = 'died: <script>alert("x")</script> & more'
CONTEXT = ReportContext(
    description="A <b>test</b>",
    config_files=("config/config.yaml",),
    git_commit="0123456789ab",
    commands={
        "everything": "snakemake --cores 2",
        "figures/speedup": "snakemake results/figures/speedup.pdf",
        "tables/speedup": "snakemake results/tables/speedup.csv",
    },
    missing=("cells/local/ddtree-b32-k8/chat-c1-r1.json",),
    versions={"torch": "2.13.0"},
)


class Page(HTMLParser):
    """What a browser would fetch, the tags, and whether every tag is closed."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.sources += [str(values[name]) for name in ("src", "srcset", "data", "poster") if name in values]
        self.links += [str(values["href"])] if "href" in values else []
        self.ids += [str(values["id"])] if "id" in values else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


Made = tuple[dict[str, pd.DataFrame], dict[str, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("results")
    simulation = Simulation(n_prompts=4, max_tokens=24, failing={("ddtree-b16-k8", r): EVIL for r in (1, 2, 3)})
    results = make_results(folder, simulation)
    frames = tables.build_tables(results.views, results.store)
    for name, figure in FIGURES.items():
        figure.draw(frames, folder / "figures" / name)
    return frames, {name: folder / "figures" / name for name in FIGURES}


@pytest.fixture(scope="module")
def text(made: Made, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(*made, CONTEXT, tmp_path_factory.mktemp("report") / "report.html").read_text()


def test_the_page_is_self_contained(text: str) -> None:
    page = Page(text)
    assert page.open == [] and "script" not in page.tags and "link" not in page.tags and "iframe" not in page.tags
    assert len(page.sources) == len(FIGURES)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert not re.search(r"https?://|@import|url\(", text)
    assert not [link for link in page.links if "://" in link or link.startswith("/")]


def test_links_inside_the_page_have_their_target(text: str) -> None:
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert {f"tables/{name}.csv" for name in tables.TABLES} <= set(page.links)


def test_everything_is_escaped(text: str) -> None:
    assert "<script" not in text and "<b>test</b>" not in text
    assert "died: &lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; &amp; more" in text
    assert "FATAL: died: &lt;script&gt;" in text


def test_the_answer_holds_every_configuration_with_its_interval(text: str, made: Made) -> None:
    answer = text[text.index('id="answer"') : text.index('id="figures"')]
    for name in ("AR", "DFlash block 8", "DDTree B=4 K=4", "DDTree B=8 K=8", "DDTree B=16 K=8"):
        assert f'<th scope="row">{name}</th>' in answer
    row = made[0]["speedup"].query("server == 'ddtree-b8-k8' and baseline == 'AR'").iloc[0]
    assert ranged(row["speedup"], row["speedup_low"], row["speedup_high"], unit="×") in answer
    assert "<td>no run</td>" in answer and "0 (3 failed)" in answer


def test_captions_commands_missing_cells_and_provenance_are_there(text: str) -> None:
    for figure in FIGURES.values():
        assert figure.caption[:60] in text
    for wanted in (
        "snakemake --cores 2",
        "snakemake results/figures/speedup.pdf",
        "ddtree-b32-k8/chat-c1-r1.json",
        "torch 2.13.0",
        "0123456789ab",
        "3f9c2ab4d1e0",
        "12fd25f",
        "mixed",
        "Xeon 8480",
        "n = 3 runs",
    ):
        assert wanted in text, wanted


def test_a_figure_and_a_table_of_one_name_keep_their_own_commands(text: str) -> None:
    figure = text[text.index('<figure id="speedup">') : text.index('<figure id="acceptance">')]
    assert "results/figures/speedup.pdf" in figure and "results/tables/speedup.csv" not in figure
    table = text[text.index('id="tables"') : text.index('id="failed"')]
    assert "results/tables/speedup.csv" in table and "results/figures/speedup.pdf" not in table


def test_the_page_says_how_to_make_it_again_and_how_to_measure_anew(made: Made, tmp_path: Path) -> None:
    file = str(Path.cwd() / "config/claim.yaml")
    context = ReportContext(config_files=(file,), commands={"everything": f"snakemake --configfile {file}"})
    page = write_report(made[0], {}, context, tmp_path / "report.html").read_text()
    again = page[page.index('id="again"') :]
    assert "<h2>Make again from the store</h2>" in again
    assert "<pre>snakemake --configfile config/claim.yaml</pre>" in again
    assert "<pre>DDTREE_BENCH_STORE=NEW_FOLDER snakemake --configfile config/claim.yaml</pre>" in again
    assert str(Path.cwd()) not in page


def test_a_path_outside_the_working_folder_stays_absolute(made: Made, tmp_path: Path) -> None:
    file = f"/elsewhere{Path.cwd()}/mine.yaml"
    page = write_report(made[0], {}, ReportContext(config_files=(file,)), tmp_path / "report.html").read_text()
    assert f"<pre>DDTREE_BENCH_STORE=NEW_FOLDER snakemake --configfile {file}</pre>" in page


def test_the_commit_of_the_page_and_those_of_the_cells_are_told_apart(made: Made, tmp_path: Path) -> None:
    frames = dict(made[0])
    frames["cells"] = frames["cells"].drop(columns="commit", errors="ignore")
    page = write_report(frames, {}, CONTEXT, tmp_path / "without.html").read_text()
    assert "<dt>Commit when this page was written</dt><dd>0123456789ab</dd>" in page
    assert "Commit when the cells were measured" not in page
    of_cells = ["aaaa1111", None, *["bbbb2222"] * (len(frames["cells"]) - 2)]
    frames["cells"] = frames["cells"].assign(commit=of_cells)
    page = write_report(frames, {}, CONTEXT, tmp_path / "with.html").read_text()
    assert "<dt>Commit when the cells were measured</dt><dd>aaaa1111, bbbb2222</dd>" in page


def test_a_machine_is_one_line_with_all_its_host_keys(made: Made) -> None:
    runs = made[0]["runs"].assign(machine_key="m" * 12, kernel="6.1")
    runs["host_key"] = ["with a drafter" if place else "without" for place in range(len(runs))]
    runs.loc[runs.index[-1], "kernel"] = "6.2"
    listing = content.hosts(runs)
    (row,) = listing.rows
    shown = dict(zip(listing.heads, row, strict=True))
    assert (shown["Host keys"], shown["Kernel"]) == ("without, with a drafter", "6.1, 6.2")
    two = content.hosts(runs.assign(machine_key=["a" if place else "b" for place in range(len(runs))]))
    assert [row[listing.heads.index("Machine key")] for row in two.rows] == ["b", "a"]


def test_the_same_input_gives_the_same_page(text: str, made: Made, tmp_path: Path) -> None:
    assert write_report(*made, CONTEXT, tmp_path / "again.html").read_text() == text


@pytest.mark.parametrize(
    "simulation",
    [
        Simulation(n_prompts=2, max_tokens=8, repeats=1),
        Simulation(n_prompts=2, max_tokens=8, repeats=1, servers=DEMO[2:]),
        Simulation(n_prompts=2, max_tokens=8, repeats=1, failing={(server.name, 1): "x" for server in DEMO}),
    ],
)
def test_a_page_is_made_of_whatever_there_is(simulation: Simulation, tmp_path: Path) -> None:
    results = make_results(tmp_path, replace(simulation))
    frames = tables.build_tables(results.views, results.store)
    page = Page(write_report(frames, {}, ReportContext(), tmp_path / "report.html").read_text())
    assert page.open == [] and "missing" not in page.ids


def test_an_empty_store_gives_a_page_that_says_so(tmp_path: Path) -> None:
    empty = tables.build_tables([], tmp_path)
    path = write_report(empty, {}, ReportContext(missing=("one cell",)), tmp_path / "report.html")
    assert "none measured yet" in path.read_text()


def test_a_figure_that_was_not_drawn_is_an_error(made: Made, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"speedup\.svg"):
        write_report(made[0], {"speedup": tmp_path / "speedup"}, CONTEXT, tmp_path / "report.html")


def rows_of(frames: dict[str, pd.DataFrame]) -> dict[str, dict[str, str]]:
    """The Answer table of the only panel, by configuration and head."""
    (listing,) = content.answers(frames)
    return {row[0]: dict(zip(listing.heads, row, strict=True)) for row in listing.rows}


def test_a_ratio_says_whether_it_was_named_and_whether_it_can_be_a_claim(tmp_path: Path) -> None:
    named = [Named("DDTREE", "AR", budget=8)]
    for repeats, last in ((3, "\nno claim (n = 3 < 5)"), (5, "")):
        results = make_results(tmp_path / str(repeats), Simulation(n_prompts=2, max_tokens=12, repeats=repeats))
        frames = tables.build_tables(results.views, results.store, named)
        rows = rows_of(frames)
        p_holm = frames["speedup"].query("named")["p_holm"].item()
        p_value = f"p (Holm) = {p_holm:.2g}" if p_holm >= 0.0001 else "p (Holm) < 0.0001"
        assert rows["DDTree B=8 K=8"]["Over AR"].endswith(f"]\nnamed\n{p_value}{last}")
        assert rows["DDTree B=8 K=8"]["Over DFlash"].endswith(f"]\nexploratory{last}")
        assert rows["DDTree B=4 K=4"]["Over AR"].endswith(f"]\nexploratory{last}")


def test_the_answer_shows_requests_outputs_and_marks(tmp_path: Path) -> None:
    simulation = Simulation(
        n_prompts=4,
        max_tokens=12,
        failing_requests={("ddtree-b4-k4", 2): (1,)},
        texts={("ddtree-b16-k8", 2): "x y"},
        spec={"ddtree-b8-k8": {"spec_tree_branching_nodes": 0}},
    )
    results = make_results(tmp_path, simulation)
    rows = rows_of(tables.build_tables(results.views, results.store))
    assert rows["DDTree B=4 K=4"]["n"] == "3\n11/12 requests" and rows["AR"]["n"] == "3"
    assert "11 of 12 requests of ddtree-b4-k4 succeeded" in rows["DDTree B=4 K=4"]["Over AR"]
    assert rows["DFlash block 8"]["Outputs = AR"] == "4/4"
    assert rows["DDTree B=16 K=8"]["Outputs = AR"] == "3/4\nfrom character 2"
    assert rows["DDTree B=8 K=8"]["Marks"] == "! no tree branched: a chain"
    assert rows["DDTree B=4 K=4"]["Marks"].splitlines()[0] == "! only 11 of 12 requests succeeded"
    assert rows["DFlash block 8"]["Marks"] == content.DASH
    assert "Accept length, pooled" in rows["AR"]


def test_the_best_budget_is_said_in_a_line(made: Made, text: str) -> None:
    (listing,) = content.answers(made[0])
    (line,) = listing.notes
    best = made[0]["budget"].dropna(subset="chosen_over_ar").iloc[0]
    bounds = (best["chosen_over_ar"], best["chosen_over_ar_low"], best["chosen_over_ar_high"])
    assert line.startswith("Best budget, chosen without the repeat it is scored on: B = ")
    assert line.endswith(f"; {ranged(*bounds, unit='×')} over AR, n = 3 pairs.")
    assert line in text


def test_failures_of_the_chosen_budget_are_said(tmp_path: Path) -> None:
    failing = {(f"ddtree-b{b}-k{min(b, 8)}", 2): "died" for b in (4, 8, 16)}
    results = make_results(tmp_path, Simulation(n_prompts=2, max_tokens=12, failing=failing))
    (line,) = content.answers(tables.build_tables(results.views, results.store))[0].notes
    assert line.endswith("over AR, n = 2 pairs; failed in 1 of 3 repeats, which have no score.")


def test_cells_that_were_broken_off_are_told_from_failed_ones(tmp_path: Path) -> None:
    simulation = Simulation(
        n_prompts=2,
        max_tokens=12,
        failing={("dflash", 1): "died"},
        records={("dflash", 2): {"aborted": "out of time"}},
    )
    results = make_results(tmp_path, simulation)
    frames = tables.build_tables(results.views, results.store)
    assert content.summary(frames)["Cells"] == "13 measured, 1 failed, 1 broken off"
    assert rows_of(frames)["DFlash block 8"]["n"] == "1 (1 failed, 1 broken off)"
    assert [failure["reason"] for failure in content.failures(frames["cells"])] == [
        "failed: died",
        "broken off: out of time",
    ]
