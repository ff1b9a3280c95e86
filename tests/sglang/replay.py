"""Saved rounds of a real server, done again by the embedded engine's tree builder and walk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddtree_reference import tree
from sglang_ddtree.tree import build_tree


class Step(NamedTuple):
    """One request in one round; node 0 is the root, and lists of nodes are those of the server."""

    request: int
    root: int
    ids: list[list[int]]
    log_probs: list[list[float]]
    parents: list[int]
    depths: list[int]
    ranks: list[int]
    best: list[int]
    """The target's likeliest token behind each node."""
    accepted: list[int]
    committed: list[int]

    @property
    def tokens(self) -> list[int]:
        """The token of each node."""
        nodes = zip(self.depths[1:], self.ranks[1:], strict=True)
        return [self.root, *(self.ids[depth - 1][rank] for depth, rank in nodes)]


def steps(path: Path) -> Iterator[Step]:
    """The requests of a round that the probe saved."""
    saved: dict[str, Any] = torch.load(path)
    batch, width = saved["chosen"].shape
    best = saved["target_logits"].argmax(-1).view(batch, width)
    for row in range(batch):
        accepted = [index - row * width for index in saved["accepted"][row].tolist() if index >= 0]
        yield Step(
            request=int(saved["requests"][row]),
            root=int(saved["roots"][row]),
            ids=saved["ids"][row].tolist(),
            log_probs=saved["log_probs"][row].tolist(),
            parents=[-1, *saved["parents"][row].tolist()],
            depths=[0, *saved["depths"][row].tolist()],
            ranks=[0, *saved["ranks"][row].tolist()],
            best=best[row].tolist(),
            accepted=accepted[: int(saved["committed"][row])],
            committed=saved["predict"][row, accepted].tolist(),
        )


def check(step: Step) -> None:
    """Raise AssertionError unless the embedded engine builds the same tree and walks the same path, greedily."""
    expected = tree.best_first(step.log_probs, len(step.parents) - 1)
    found = tree.Tree(tuple(step.parents), tuple(step.depths), tuple(step.ranks))
    assert found == expected, f"request {step.request}: the tree is not the embedded engine's"
    path, last = tree.walk(step.parents, step.tokens, step.best.__getitem__)
    assert step.accepted == path, f"request {step.request}: accepted {step.accepted}, not {path}"
    wanted = [*(step.tokens[node] for node in path[1:]), last]
    assert step.committed == wanted, f"request {step.request}: committed {step.committed}, not {wanted}"


def nodes(step: Step, budget: int) -> set[tuple[int, ...]]:
    """The paths of ranks that the plugin's builder puts into a tree of this budget on the step's candidates."""
    built = build_tree(torch.tensor([step.log_probs]), budget)
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(built.parents[0].tolist(), built.ranks[0].tolist(), strict=True):
        paths.append((*paths[parent], rank))
    return set(paths[1:])


def texts(rounds: Sequence[Sequence[Step]]) -> dict[int, list[int]]:
    """What each request has committed, the first root in front."""
    found: dict[int, list[int]] = {}
    for step in (step for one in rounds for step in one):
        found.setdefault(step.request, [step.root]).extend(step.committed)
    return found


def accept_lengths(rounds: Sequence[Sequence[Step]], budgets: Sequence[int]) -> dict[int, float]:
    """The pooled accept length that trees of several budgets reach on the same drafts.

    Rounds whose next tokens are not all known, at the end of a text, are left out.
    """
    text, at = texts(rounds), dict.fromkeys(texts(rounds), 0)
    committed = dict.fromkeys(budgets, 0)
    count = 0
    for step in (step for one in rounds for step in one):
        start = at[step.request] + 1
        at[step.request] += len(step.committed)
        following = text[step.request][start : start + len(step.ids)]
        if len(following) < len(step.ids):
            continue
        count += 1
        for budget in budgets:
            committed[budget] += 1 + _reached(step, nodes(step, budget), following)
    return {budget: total / count for budget, total in committed.items()}


def _reached(step: Step, paths: set[tuple[int, ...]], following: Sequence[int]) -> int:
    path: tuple[int, ...] = ()
    for ids, token in zip(step.ids, following, strict=True):
        if token not in ids or (*path, ids.index(token)) not in paths:
            break
        path = (*path, ids.index(token))
    return len(path)
