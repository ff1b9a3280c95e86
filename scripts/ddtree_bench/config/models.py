"""The configuration as typed models: the source of the schema, the default file's comments and the reference table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ddtree_bench.config.training import Training

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]


def _texts(value: Any) -> Any:
    """Numbers as users write them in YAML; a switch has an empty value."""
    if not isinstance(value, dict):
        return value
    return {k: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()}


Flags = Annotated[dict[str, str], BeforeValidator(_texts)]


Engine = Literal["reference", "sglang", "other"]


# `--config retry_failed=true` on Snakemake's command line comes as text.
Switch = Annotated[bool, Field(strict=False)]


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Target(Section):
    """A machine, or an allocation of one, to measure on."""

    launcher: Literal["local", "ssh", "slurm", "external"]
    """How servers are run: `local` (child processes of this machine), `ssh` (systemd units of a host that is reached
    over SSH) or `external` (an endpoint that is up already: nothing is started or stopped); `slurm` can be planned."""
    engine: Engine
    """What serves there, unless a sweep block says otherwise; `other` is for `external` alone."""
    url: str | None = None
    """The address of an `external` endpoint, such as http://HOST:PORT, without /v1."""
    served_model: str | None = None
    """The model's name in requests to an `external` endpoint; by default `models.<name>.name`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key of an `external` endpoint; its value is never recorded."""
    flush_cache: bool = False
    """Empty the prefix cache of an `external` endpoint before each cell (POST /flush_cache). It is everybody's there,
    so this is asked for; of servers that are started it is always emptied."""
    ssh_host: str | None = None
    """The host of an `ssh` target, as you would give it to ssh: a Host of your OpenSSH configuration, or USER@HOST."""
    ssh_config: str | None = None
    """Another OpenSSH configuration than ~/.ssh/config for an `ssh` target."""
    scope: Literal["system", "user"] | None = None
    """Whose systemd runs the servers of an `ssh` target, which must say so: `system` (root, or sudo without a password)
    or `user` (that of the login, with lingering)."""
    client: Literal["here", "target"] = "here"
    """Where the load client of an `ssh` target runs: `here`, through a port forward of OpenSSH whose round trip is in
    every latency, or on the `target` itself, beside the server."""
    reconnect_s: Annotated[float, Field(ge=0)] = 300.0
    """How long a lost link to an `ssh` target is tried again, as after a reboot, before the run fails."""
    memory_max_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory that a server of an `ssh` target may take (MemoryMax of its unit); by default without a limit."""
    keep_environments: Annotated[int, Field(ge=0)] = 2
    """How many environments on an `ssh` target `prune` keeps beside those of the plan: those that were used last."""
    description: str = ""
    """Free text for people; never part of a cell's identity."""
    host: str = "127.0.0.1"
    """The address that servers listen on; that of an `ssh` target is one of the host's own."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The servers' port; 0 takes a free one for each start."""
    root: str | None = None
    """Folder on the target that holds deployed environments; by default results/environments/installed, on an `ssh`
    target ~/ddtree-bench."""
    sglang_build: Literal["cuda13", "cuda12", "cpu"] = "cuda13"
    """Which build of SGLang the target takes: `cuda13` (GPUs) or `cpu` (interpreted kernels, for tests and micro
    models). Of `cuda12` there is none with DDTree."""
    adopt: str | None = None
    """A Python interpreter or a virtual environment on the target in which SGLang is installed already: it is used as
    it is, unchanged, with the plugin beside it. By default SGLang is installed by the workflow."""
    lease_dir: str | None = None
    """Folder of the leases that keep runs apart, on the target, and on this machine for targets that are here; by
    default one for all users of the machine."""
    lease_ttl_s: Annotated[float, Field(ge=5)] | None = None
    """How long a server lives on when its measuring process is gone or cut off; by default 10, on an `ssh` target 60,
    so that it outlives a link that is cut for a while."""
    lease_wait_s: Annotated[float, Field(ge=0)] = 600.0
    """How long a run waits for somebody else's run, on this target or on this machine, before it fails with that
    owner's name."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 180.0
    """How long a server may take to become ready (a 590 GB model needs 645 s)."""
    stop_grace_s: Annotated[float, Field(gt=0)] = 8.0
    """How long a server may take to end after SIGTERM before it is killed."""
    pass_env: list[str] = []
    """Names of environment variables that servers get from yours, such as tokens; the values are never recorded."""
    graph_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory that CUDA graphs' logits may take in all; checked against max_running_requests x verify width rows."""
    flags: Flags = {}
    """Further launch flags of every server there, name: value (an empty value for a switch)."""


class Drafter(Section):
    """The block drafter of a model."""

    name: str
    """The drafter's published name."""
    revision: str = ""
    """Its revision (commit, tag or version); must be given, unless it is that of a micro model."""
    block_size: Annotated[int, Field(ge=2)]
    """The block it was trained for, the anchor token included; no server may use a larger one."""
    paths: dict[str, str] = {}
    """Where its files lie, by target; not needed where the engine brings them. Never part of a cell's identity."""


class Model(Section):
    """A target model and its drafter."""

    name: str
    """The model's published name."""
    revision: str = ""
    """Its revision (commit, tag or version); must be given, unless `micro` is."""
    micro: Literal["plain", "mla_moe", "hybrid_gdn"] | None = None
    """The kind of a micro model: the workflow trains it and its drafter in a minute or two, so it has no paths, and its
    revision is a digest of the recipe. It is for trying servers out, never for claims about speed."""
    drafter: Drafter | None = None
    """Its DFlash drafter; DFLASH and DDTREE need one."""
    hybrid: bool = False
    """Whether it has recurrent layers (Mamba, GDN): a tree of drafts cannot be verified exactly by these."""
    allow_hybrid_unsafe: bool = False
    """Let DDTREE run on a hybrid model all the same."""
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Vocabulary, for the estimate of the graphs' logits."""
    tokenizer: str | dict[str, str] | None = None
    """Its tokenizer.json on this machine, or the folder that holds it (one path, or paths by target): counts the tokens
    of stored answers, when tables are made, where the server did not say how many there were. It changes tables, never
    what is measured."""
    paths: dict[str, str] = {}
    """Where its files lie, by target; not needed where the engine brings them. Never part of a cell's identity."""


class Slos(Section):
    """Service level objectives: goodput counts the requests that meet all that are given."""

    ttft_s: Annotated[float, Field(gt=0)] | None = None
    """Longest time to the first token; in open loop from the request's scheduled start."""
    tpot_s: Annotated[float, Field(gt=0)] | None = None
    """Longest mean time per token after the first."""
    e2e_s: Annotated[float, Field(gt=0)] | None = None
    """Longest time to the end of the answer; in open loop from the request's scheduled start."""


class Workload(Section):
    """A prompt set, the sampling and the length rule."""

    prompts: str
    """Prompt file (JSON lines with id, block, category, prompt), relative to the repository."""
    blocks: list[Annotated[int, Field(ge=1)]] | None = None
    """The blocks of the file that every cell takes in full; by default cells take as many prompts as they need."""
    n_min: Annotated[int, Field(ge=1)] = 12
    """Least number of requests in a cell; without `blocks`, one at concurrency C takes the first max(n_min, 4 C)."""
    open_loop_s: Annotated[float, Field(gt=0)] = 30.0
    """How long requests arrive in a cell with a `rate`: it takes the first max(n_min, rate x open_loop_s) prompts."""
    max_tokens: Annotated[int, Field(ge=1)]
    """Most tokens of an answer."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 decodes greedily."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; always sent, so that no server default applies."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Top-k sampling, -1 for none; always sent, so that no server default applies."""
    seed: int = 0
    """Seed of sampled decoding and, with the repeat's number added, of an open loop's arrivals."""
    ignore_eos: bool = False
    """Run every answer to max_tokens: equal lengths, but text after its end inflates the accept length."""
    repeat_prompts: bool = False
    """Let prompts occur more than once when the file has too few; marked in every figure."""
    endpoint: Literal["chat", "completions"] = "chat"
    """The API that is called."""
    slos: Slos | None = None
    """Objectives for the goodput. They change tables, never what is measured."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest time from sending a request to the end of its answer; one that takes longer is a `timeout`. No part of a
    cell's identity: after raising it, `retry_failed` measures the cells with such requests again."""
    cell_timeout_s: Annotated[float, Field(gt=0)] = 7200.0
    """Longest time of a cell. What is in flight then is a `timeout`, the rest is not sent, and no ratio is given."""


def _axis(item: Any) -> Any:
    return Annotated[list[item], BeforeValidator(_listed), Field(min_length=1)]


class Point(Section):
    """Some coordinates: what `include` adds (the block's first values fill the rest) and what `exclude` matches."""

    target: Name | None = None
    """A key of `targets`."""
    engine: Engine | None = None
    """What serves."""
    model: Name | None = None
    """A key of `models`."""
    method: Literal["AR", "DFLASH", "DDTREE"] | None = None
    """How tokens are decoded."""
    budget: Annotated[int, Field(ge=1)] | None = None
    """Nodes of the draft tree, the root not counted."""
    topk_cap: Annotated[int, Field(ge=1)] | Literal["budget"] | None = None
    """Most candidates a depth."""
    block_size: Annotated[int, Field(ge=2)] | None = None
    """The drafter's block, the anchor included."""
    tensor_parallel: Annotated[int, Field(ge=1)] | None = None
    """Tensor parallelism."""
    expert_parallel: Annotated[int, Field(ge=1)] | None = None
    """Expert parallelism."""
    max_running_requests: Annotated[int, Field(ge=1)] | None = None
    """Requests that a server admits at once."""
    workload: Name | None = None
    """A key of `workloads`."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Requests kept in flight; with a rate, the most in flight (in `include` by default 256)."""
    rate: Annotated[float, Field(gt=0)] | None = None
    """Requests that arrive a second (open loop)."""


class SweepBlock(Section):
    """The product of its lists. Axes that a method does not know collapse (AR: budget); equal cells merge."""

    target: _axis(Name)  # type: ignore[valid-type]
    """Keys of `targets`."""
    model: _axis(Name)  # type: ignore[valid-type]
    """Keys of `models`."""
    method: _axis(Literal["AR", "DFLASH", "DDTREE"])  # type: ignore[valid-type]
    """AR (autoregressive), DFLASH (one chain of drafts), DDTREE (a tree of drafts)."""
    workload: _axis(Name)  # type: ignore[valid-type]
    """Keys of `workloads`."""
    concurrency: _axis(Annotated[int, Field(ge=1)]) | None = None  # type: ignore[valid-type]
    """Requests kept in flight (closed loop), by default 1. With `rate`: the most in flight, by default 256."""
    rate: _axis(Annotated[float, Field(gt=0)]) | None = None  # type: ignore[valid-type]
    """Requests that arrive a second, whether or not earlier ones are answered (open loop)."""
    arrivals: Literal["poisson", "constant"] = "poisson"
    """How requests with a `rate` arrive: at random (exponential intervals) or at equal intervals."""
    budget: _axis(Annotated[int, Field(ge=1)]) | None = None  # type: ignore[valid-type]
    """Nodes of the draft tree, the root not counted; DDTREE needs it. A forward verifies budget + 1 rows a request."""
    topk_cap: _axis(Annotated[int, Field(ge=1)] | Literal["budget"]) = ["budget"]  # type: ignore[valid-type]
    """Most candidates a depth; `budget` for no cap of its own. What counts is min(topk_cap, budget)."""
    block_size: _axis(Annotated[int, Field(ge=2)]) | None = None  # type: ignore[valid-type]
    """The drafter's block, the anchor included; by default the one the drafter was trained for."""
    engine: Engine | None = None
    """What serves; by default the target's engine."""
    tensor_parallel: _axis(Annotated[int, Field(ge=1)]) = [1]  # type: ignore[valid-type]
    """Tensor parallelism."""
    expert_parallel: _axis(Annotated[int, Field(ge=1)]) = [1]  # type: ignore[valid-type]
    """Expert parallelism."""
    max_running_requests: Annotated[int, Field(ge=1)] = 48
    """Requests that a server admits at once: a part of what it is, so it does not follow the concurrency by itself."""
    flags: Flags = {}
    """Further launch flags, name: value (an empty value for a switch)."""
    include: list[Point] = []
    """Points to add."""
    exclude: list[Point] = []
    """Points to leave out: those that agree in every key given."""


class Comparison(Section):
    """A comparison that is named before it is measured; all others are exploratory."""

    method: Literal["DFLASH", "DDTREE"]
    """The method that is claimed to be better."""
    baseline: Literal["AR", "DFLASH"]
    """What it is compared with."""
    budget: Annotated[int, Field(ge=1)] | None = None
    """Its budget; without one every budget of the sweep is named."""
    topk_cap: Annotated[int, Field(ge=1)] | None = None
    """Its effective cap; without one every cap of the sweep is named."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """The concurrency of both (closed loop); without one and without a rate every load is named, and each counts."""
    rate: Annotated[float, Field(gt=0)] | None = None
    """The rate of both (open loop)."""


class WarmUp(Section):
    """What every server answers between its start and its first measured request."""

    prompts: str = "config/prompts/warmup.jsonl"
    """Prompt file of the warm-up; it must be disjoint from the measured prompts."""
    max_tokens: Annotated[int, Field(ge=1)] = 16
    """Most tokens of a warm-up answer. Each concurrency and class of prompt lengths is warmed up."""


class Config(Section):
    """The whole configuration."""

    description: str = ""
    """Free text for people; the report shows it."""
    repeats: Annotated[int, Field(ge=1)] = 3
    """Fresh server starts of every server: the statistical unit. An interval needs 3, a claim 5."""
    seed: int = 1
    """Seed of the order of the servers inside each repeat."""
    max_restarts: Annotated[int, Field(ge=0)] = 2
    """How often a run starts its server again after a crash to measure the cells that are left."""
    retry_failed: Switch = False
    """Measure failed cells again, those that were broken off at `cell_timeout_s`, and those with requests that ran
    into `request_timeout_s`."""
    hash_models: Switch = False
    """Record the whole sha256 of every model file when a target is probed, which takes long; what tells two contents
    apart otherwise are the sizes, headers and samples."""
    allow_missing_baseline: Switch = False
    """Plan DFLASH or DDTREE without AR beside it; such cells get no speed-up."""
    comparisons: list[Comparison] = []
    """Comparisons named before measuring: Holm's correction runs over these, and only they can be claims."""
    targets: Annotated[dict[Name, Target], Field(min_length=1)]
    """The targets by name. One that no sweep block names is not touched."""
    models: Annotated[dict[Name, Model], Field(min_length=1)]
    """The models by name."""
    workloads: Annotated[dict[Name, Workload], Field(min_length=1)]
    """The workloads by name."""
    warmup: WarmUp = WarmUp()
    """The warm-up."""
    training: Training = Training()
    """The drafter's training (`snakemake train_drafter`); no part of what is measured."""
    sweep: Annotated[list[SweepBlock], Field(min_length=1)]
    """What is measured: the union of these blocks."""
