"""The command line of the drafter's training: one command a stage, each of which goes on where it was ended."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger("ddtree_training")

# After the layers of the target whose outputs the drafter reads, spread over its depth
FEATURE_LAYERS = {"smollm2": (2, 9, 16, 22, 28), "toy": (0, 1)}

ANSWER_CONTEXT = 1024  # tokens of a prompt and its answer


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="ddtree_training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_prompts(commands)
    _add_answers(commands)
    _add_features(commands)
    _add_train(commands)
    _add_export(commands)
    _add_evaluate(commands)
    _add_card(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (ValueError, OSError) as error:
        log.error("%s", error)
        return 2
    return status


def _add_prompts(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("prompts", help="list the prompts to train on")
    command.add_argument("--templates", type=Path, required=True, help="folder of the prompt files (*.toml)")
    command.add_argument("--seed", type=int, default=0, help="decides which templates meet which topics, and the order")
    command.add_argument(
        "--exclude",
        type=Path,
        nargs="+",
        default=[],
        help="JSON lines of prompts that are measured: keep away from them",
    )
    command.add_argument("--output", type=Path, required=True, help="JSON lines of prompts")
    command.set_defaults(run=_prompts)


def _add_answers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("answers", help="let the target answer the prompts greedily")
    _add_model(command)
    command.add_argument("--prompts", type=Path, required=True, help="JSON lines of prompts")
    command.add_argument("--tokens", type=_positive, required=True, help="answer tokens in all")
    command.add_argument("--max-tokens", type=_positive, default=180, help="tokens of an answer at most")
    command.add_argument("--batch", type=_positive, default=48, help="answers at a time")
    command.add_argument("--output", type=Path, required=True, help="JSON lines of answers, appended to")
    command.set_defaults(run=_answers)


def _add_features(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("features", help="record what the target thinks along its answers")
    _add_model(command)
    command.add_argument("--answers", type=Path, required=True, help="JSON lines of answers")
    command.add_argument("--output", type=Path, required=True, help="folder of the shards")
    command.set_defaults(run=_features)


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("train", help="train the drafter on recorded answers")
    _add_model(command)
    command.add_argument("--features", type=Path, required=True, help="folder of the shards")
    command.add_argument("--output", type=Path, required=True, help="folder of the checkpoint and the curve")
    command.add_argument("--steps", type=_positive, required=True, help="length of the training")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--layers", type=_positive, default=2, help="layers of the drafter")
    command.add_argument("--vocabulary", type=_positive, default=8192, help="tokens that can be drafted")
    command.add_argument("--sequences", type=_positive, default=8, help="answers of a step")
    command.add_argument("--anchors", type=_positive, default=24, help="blocks an answer in a step")
    command.add_argument("--block", type=_positive, default=8, help="tokens of a block, the anchor included")
    command.add_argument("--long-share", type=_share, default=0.2, help="share of steps with blocks twice as long")
    command.add_argument(
        "--soft-share", type=_share, default=0.5, help="weight of the target's distribution against its greedy token"
    )
    command.add_argument("--learning-rate", type=float, default=1.5e-3, help="peak of the schedule")
    command.add_argument("--warmup", type=_positive, default=100, help="steps to the peak")
    command.add_argument("--ema-decay", type=_share, default=0.999, help="memory of the averaged weights")
    command.add_argument("--held-out", type=_share, default=0.025, help="share of the prompts validated on")
    command.add_argument("--checkpoint-every", type=_positive, default=100, help="steps between checkpoints")
    command.add_argument("--validate-every", type=_positive, default=250, help="steps between validations")
    command.set_defaults(run=_train)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("export", help="write the trained drafter as int8")
    command.add_argument("--training", type=Path, required=True, help="folder of the checkpoint")
    command.add_argument("--output", type=Path, required=True, help="the drafter's file")
    command.add_argument("--unfinished", action="store_true", help="also if the training has not ended")
    command.set_defaults(run=_export)


def _add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("evaluate", help="measure a drafter's acceptance in real decoding")
    _add_model(command)
    command.add_argument("--drafter", type=Path, required=True, help="the drafter's file")
    command.add_argument("--compare", type=Path, help="another drafter's file, measured on the same prompts")
    command.add_argument("--prompts", type=Path, required=True, help='JSON lines {"id", "category", "prompt"}')
    command.add_argument("--limit", type=_positive, help="use the first prompts only")
    command.add_argument("--tokens", type=_positive, default=64, help="tokens of an answer at most")
    command.add_argument(
        "--methods",
        nargs="+",
        default=["DFLASH:8", "DDTREE:4", "DDTREE:8", "DDTREE:16", "DDTREE:32"],
        metavar="METHOD",
        help="DFLASH, DFLASH:BLOCK, DDTREE:BUDGET or DDTREE:BUDGET:CAP",
    )
    command.add_argument("--output", type=Path, required=True, help="the result as JSON")
    command.set_defaults(run=_evaluate)


def _add_card(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("card", help="write the model card from what the stages recorded")
    _add_model(command)
    command.add_argument("--template", type=Path, required=True, help="the card as a Jinja template")
    command.add_argument("--answers", type=Path, required=True, help="JSON lines of answers")
    command.add_argument("--training", type=Path, required=True, help="folder of the checkpoint and the curve")
    command.add_argument("--drafter", type=Path, required=True, help="the drafter's file")
    command.add_argument("--evaluation", type=Path, required=True, help="the result of 'evaluate'")
    command.add_argument("--output", type=Path, required=True, help="the card")
    command.set_defaults(run=_card)


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", choices=sorted(FEATURE_LAYERS), default="smollm2")
    command.add_argument("--threads", type=_positive, default=1, help="threads of one tensor operation")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a share: at least 0, less than 1")
    return value


# The commands import what they need themselves: --help answers without loading torch.


def _prompts(options: argparse.Namespace) -> int:
    from ddtree_reference import lossless
    from ddtree_training import prompt_list, prompts

    made = prompts.expand(options.templates, options.seed)
    measured = [entry["prompt"] for path in options.exclude for entry in lossless.read_prompts(path)]
    kept = prompts.exclude(made, measured)
    prompt_list.write(kept, options.output)
    log.info(
        "%d prompts in %s, %d left out that come near a measured one", len(kept), options.output, len(made) - len(kept)
    )
    return 0


def _answers(options: argparse.Namespace) -> int:
    import torch

    from ddtree_reference import startup
    from ddtree_reference.method import Method
    from ddtree_training import answers, prompt_list

    torch.set_num_threads(options.threads)
    opened = startup.open_engine(options.model, "auto", [Method("AR")], options.batch, max_context=ANSWER_CONTEXT)
    listed = prompt_list.read(options.prompts)
    held = answers.generate(opened.engine, opened.tokenizer, listed, options.tokens, options.max_tokens, options.output)
    if held < options.tokens:
        log.error(
            "%s: %d answer tokens, fewer than %d: the prompts are used up; add topics, or ask for fewer tokens",
            options.output,
            held,
            options.tokens,
        )
        return 1
    log.info("%d answer tokens in %s", held, options.output)
    return 0


def _features(options: argparse.Namespace) -> int:
    import torch

    from ddtree_training import answers_file, features, teacher

    torch.set_num_threads(options.threads)
    answers = answers_file.read(options.answers)
    shards = features.extract(
        teacher.load(options.model), answers, FEATURE_LAYERS[options.model], options.output, options.model
    )
    log.info("%d answers in %d shards in %s", len(answers), len(shards), options.output)
    return 0


def _train(options: argparse.Namespace) -> int:
    import torch

    from ddtree_training import features, teacher, train

    torch.set_num_threads(options.threads)
    settings = train.Settings(
        steps=options.steps,
        seed=options.seed,
        n_layers=options.layers,
        vocabulary=options.vocabulary,
        sequences=options.sequences,
        anchors=options.anchors,
        block=options.block,
        long_share=options.long_share,
        soft_share=options.soft_share,
        peak_lr=options.learning_rate,
        warmup=options.warmup,
        ema_decay=options.ema_decay,
        held_out=options.held_out,
    )
    intervals = train.Intervals(options.checkpoint_every, options.validate_every)
    shards = features.find(options.features)
    path = train.run(teacher.load(options.model), shards, options.output, settings, intervals)
    log.info("%d steps in %s", settings.steps, path)
    return 0


def _export(options: argparse.Namespace) -> int:
    from ddtree_training import export

    step = export.run(options.training, options.output, options.unfinished)
    log.info("%s after step %d, %.1f MB", options.output, step, options.output.stat().st_size / 1e6)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    import torch

    from ddtree_reference import lossless
    from ddtree_training import evaluate

    torch.set_num_threads(options.threads)
    prompts = evaluate.with_categories(options.prompts, lossless.read_prompts(options.prompts)[: options.limit])
    methods = tuple(lossless.parse_method(text) for text in options.methods)
    evaluation = evaluate.Evaluation(options.model, prompts, methods, options.tokens)
    evaluate.print_table(evaluate.run(evaluation, options.drafter, options.compare, options.output))
    return 0


def _card(options: argparse.Namespace) -> int:
    from ddtree_training import card

    records = (options.answers, options.training, options.drafter, options.evaluation)
    card.run(options.template, options.model, *records, options.output)
    return 0
