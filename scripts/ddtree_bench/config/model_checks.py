"""Checks of models: what they are, where they lie, and whether a tree of their drafter can be as large as planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtree_bench.config.models import Config, Drafter, Model
from ddtree_bench.config.sweep import METHODS_WITH_DRAFTER, Coordinates

MICRO_BLOCK_SIZES = range(2, 33)
"""Blocks that the training of micro models knows."""


def check_models(config: Config, points: Sequence[Coordinates]) -> list[str]:
    """A model has a revision, and paths on the targets whose engine brings none; a micro model has neither."""
    problems: dict[str, None] = {}
    for name, model in config.models.items():
        parts: dict[str, Model | Drafter] = {f"models.{name}": model}
        parts |= {f"models.{name}.drafter": model.drafter} if model.drafter else {}
        for where, part in parts.items():
            if not model.micro and not part.revision:
                problems[f"{where}.revision: is missing; add the commit, tag or version"] = None
            if model.micro:
                problems |= dict.fromkeys(_not_of_micro_models(where, part))
        if model.micro:
            problems |= dict.fromkeys(_micro_problems(name, model))
    for point in points:
        problems |= dict.fromkeys(_place_problems(config, point))
    return list(problems)


def _not_of_micro_models(where: str, part: Model | Drafter) -> Iterator[str]:
    for key in ("revision", "paths", "tokenizer"):
        if key in part.model_fields_set:
            yield f"{where}.{key}: a micro model is trained by the workflow, which knows it; take the key out"


def _micro_problems(name: str, model: Model) -> Iterator[str]:
    if model.drafter is None:
        yield f"models.{name}.drafter: is missing; a micro model is trained with one: give its name and block_size"
    elif model.drafter.block_size not in MICRO_BLOCK_SIZES:
        yield (
            f"models.{name}.drafter.block_size: is {model.drafter.block_size}, but a micro model is trained with "
            f"{MICRO_BLOCK_SIZES[0]} to {MICRO_BLOCK_SIZES[-1]}; lower it"
        )
    if model.hybrid != (model.micro == "hybrid_gdn"):
        said, right = (str(value).lower() for value in (model.hybrid, not model.hybrid))
        yield f"models.{name}.hybrid: is {said}, but a micro model of kind {model.micro} is not so; set it to {right}"


def _place_problems(config: Config, point: Coordinates) -> Iterator[str]:
    """What keeps a model from being where a server is to find it."""
    model, target = config.models[point.model], config.targets[point.target]
    where = f"sweep[{point.block}]"
    if model.micro:
        if target.launcher != "local":
            yield (
                f"models.{point.model}.micro: is trained on this machine, but {where} serves it on {point.target} by "
                f"launcher {target.launcher}; use a target with launcher local, or give a revision in place of micro"
            )
        elif point.engine != "sglang":
            yield (
                f"models.{point.model}.micro: is trained for SGLang and by its environment, but {where} serves it on "
                f"{point.target} with engine {point.engine}; set engine: sglang there, or use another model"
            )
        return
    if point.engine != "sglang" or target.launcher == "external":
        return
    if point.target not in model.paths:
        yield f"models.{point.model}.paths.{point.target}: is missing, but {where} serves it there; give its folder"
    drafted = point.method in METHODS_WITH_DRAFTER and model.drafter is not None
    if drafted and model.drafter and point.target not in model.drafter.paths:
        yield (
            f"models.{point.model}.drafter.paths.{point.target}: is missing, but {where} drafts with it there; "
            "give its folder"
        )


def check_tree_sizes(points: Sequence[Coordinates]) -> list[str]:
    """A tree of a narrow cap or a short block has no room for a large budget; SGLang's plugin would cut it."""
    problems: dict[str, None] = {}
    for point in points:
        budget, cap, block = point.budget, point.topk_cap, point.block_size
        if point.engine != "sglang" or budget is None or cap is None or block is None:
            continue
        depth = block - 1
        most = depth if cap == 1 else (cap ** (depth + 1) - cap) // (cap - 1)
        if budget > most:
            problems[
                f"sweep[{point.block}].budget: {budget} is more than the {most} nodes that a tree of {depth} depths "
                f"with at most {cap} candidates each can have; lower it, or raise topk_cap"
            ] = None
    return list(problems)


def check_parallelism(points: Sequence[Coordinates]) -> list[str]:
    """SGLang splits the experts within the tensor parallel ranks."""
    problems: dict[str, None] = {}
    for point in points:
        tensor, expert = point.tensor_parallel, point.expert_parallel
        if point.engine == "sglang" and tensor % expert:
            problems[
                f"sweep[{point.block}].expert_parallel: {expert} does not divide tensor_parallel, which is {tensor}; "
                "SGLang splits experts within these ranks, so give tensor_parallel too"
            ] = None
    return list(problems)
