"""Candidates from a head that is split over the vocabulary, on one process and on real gloo ranks."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sglang_ddtree import candidates
from sglang_ddtree.candidates import CandidateHead, pack_keys, top_candidates, unpack_keys


class Processor:
    """The part of SGLang's LogitsProcessor that a CandidateHead reads."""

    do_tensor_parallel_all_gather = False
    do_tensor_parallel_all_gather_dp_attn = False

    def __init__(self, vocab_size, scale=None, softcap=None):
        self.vocab_size = vocab_size
        self.logit_scale = scale
        self.final_logit_softcapping = softcap
        self.rows_at_once = []

    def _compute_lm_head(self, hidden, head):
        self.rows_at_once.append(hidden.shape[0])
        return hidden.to(head.weight.dtype) @ head.weight.T


class GlooGroup:
    """The part of SGLang's GroupCoordinator that a CandidateHead calls; records what a rank sends."""

    def __init__(self):
        self.world_size = torch.distributed.get_world_size()
        self.sent = []

    def all_gather_into_tensor(self, output, tensor):
        self.sent.append(tuple(tensor.shape))
        torch.distributed.all_gather_into_tensor(output, tensor)


def split_head(logits, rank=0, ranks=1, group=None):
    """One rank's padded part of the head that gives row r of ``logits`` [rows, vocabulary] for the unit vector e_r.

    The parts are SGLang's: the vocabulary is padded to a multiple of 64 and cut into equal shards. A padding row of
    the weight is 9, which would win every row if it counted.
    """
    vocabulary = logits.shape[1]
    shard = -(-vocabulary // 64) * 64 // ranks
    start, end = min(rank * shard, vocabulary), min((rank + 1) * shard, vocabulary)
    weight = logits.new_full((shard, logits.shape[0]), 9.0)
    weight[: end - start] = logits.T[start:end]
    return SimpleNamespace(
        weight=weight,
        shard_indices=SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end),
        num_embeddings=vocabulary,
        org_vocab_size=vocabulary,
        tp_size=ranks,
        tp_group=group,
        use_attn_tp_group=False,
    )


def ranking(logits, cap, scale=None, softcap=None):
    """The definition, in float64: logit descending, then id ascending, and the log-softmax of the capped logits."""
    scaled = logits if scale is None else logits * scale
    ids = scaled.sort(dim=-1, descending=True, stable=True).indices[:, :cap]
    capped = scaled.double() if softcap is None else softcap * torch.tanh(scaled.double() / softcap)
    return ids, torch.log_softmax(capped, dim=-1).gather(-1, ids)


def find_candidates(case, rank=0, ranks=1, group=None):
    head = split_head(case["logits"], rank, ranks, group)
    processor = Processor(case["logits"].shape[1], case.get("scale"), case.get("softcap"))
    return CandidateHead(head, processor, case["cap"])(torch.eye(case["logits"].shape[0]))


def random_logits(vocabulary, seed=0, rows=20):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def tied_logits():
    """Four tokens of different shards share the best logit; in row 0 three do, as zeros of both signs."""
    logits = random_logits(321, seed=3).clamp(max=7.5)
    logits[:, [5, 100, 200, 320]] = 8.0
    logits[0] = -1.0 - torch.arange(321) / 64
    logits[0, [260, 7]] = 0.0
    logits[0, 70] = -0.0
    return logits


CASES = {
    "padded vocabulary": {"logits": random_logits(321), "cap": 8},
    "scaled and soft-capped": {"logits": random_logits(321, seed=1) * 10, "cap": 16, "scale": 0.25, "softcap": 5.0},
    "ties across shards": {"logits": tied_logits(), "cap": 7},
    "cap above a shard, and a shard without tokens": {"logits": random_logits(70, seed=2), "cap": 40},
    "bfloat16 head": {
        "logits": torch.randperm(255, generator=torch.Generator().manual_seed(4))[None].bfloat16(),
        "cap": 9,
    },
}


def run_rank(rank, ranks, folder):
    """Answer every case, then one with the mutant that takes positions in the shard for ids."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    group = GlooGroup()
    found = {name: find_candidates(case, rank, ranks, group) for name, case in CASES.items()}
    ranked = candidates.top_candidates
    candidates.top_candidates = lambda logits, cap, _, softcap: ranked(logits, cap, 0, softcap)
    mutant = find_candidates(CASES["padded vocabulary"], rank, ranks, group)
    torch.save({"found": found, "mutant": mutant, "sent": group.sent}, folder / f"{rank}.pt")


@pytest.fixture(scope="module", params=[2, 4])
def answers(request, tmp_path_factory):
    """What each of 2 or 4 gloo ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = [sys.executable, __file__, str(request.param), str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


@pytest.mark.parametrize("name", CASES)
def test_one_rank_follows_the_definition(name):
    case = CASES[name]
    ids, log_probs = find_candidates(case)

    expected_ids, expected = ranking(**case)
    assert (ids.dtype, log_probs.dtype) == (torch.int64, torch.float32)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_with_one_rank(answers, name):
    alone = find_candidates(CASES[name])
    first = answers[0]["found"][name]

    assert torch.equal(first.ids, alone.ids)
    torch.testing.assert_close(first.log_probs, alone.log_probs, rtol=0, atol=1e-6)
    for answer in answers[1:]:
        assert torch.equal(answer["found"][name].ids, first.ids)
        assert torch.equal(answer["found"][name].log_probs, first.log_probs)


def test_positions_in_the_shard_taken_for_ids_would_be_seen(answers):
    expected = find_candidates(CASES["padded vocabulary"])
    assert all(not torch.equal(answer["mutant"].ids, expected.ids) for answer in answers)


def test_ranks_send_candidates_and_one_log_sum_a_row_in_one_collective(answers):
    shapes = [(case["logits"].shape[0], case["cap"] + 1) for case in CASES.values()]
    assert all(answer["sent"][: len(shapes)] == shapes for answer in answers)


def test_keys_sort_as_logits_descending_then_ids_ascending_and_give_both_back():
    logits = torch.tensor([float("inf"), 3e38, 1.5, 1.5, 1e-40, 0.0, -0.0, -1e-40, -2.0, -2.0, -3e38, float("-inf")])
    ids = torch.tensor([9, 0, 0, 248_319, 7, 4, 5, 1, 2, 2**31 - 1, 0, 6])
    keys = pack_keys(logits, ids)

    assert (keys[:-1] > keys[1:]).all()
    unpacked_logits, unpacked_ids = unpack_keys(keys)
    assert torch.equal(unpacked_logits, logits)
    assert torch.equal(unpacked_ids, ids)


def test_large_logits_stay_finite_and_sum_to_one():
    case = {"logits": random_logits(64) + 3e4, "cap": 64}
    assert find_candidates(case).log_probs.double().exp().sum(-1).sub(1).abs().max() < 1e-5


def test_rows_are_computed_in_bounded_chunks_with_the_same_result(monkeypatch):
    case = CASES["scaled and soft-capped"]
    whole = find_candidates(case)
    monkeypatch.setattr(candidates, "MAX_CHUNK_LOGITS", 321 * 6 + 5)
    processor = Processor(321, case["scale"], case["softcap"])
    chunked = CandidateHead(split_head(case["logits"]), processor, case["cap"])(torch.eye(20))

    assert processor.rows_at_once == [6, 6, 6, 2]
    assert torch.equal(chunked.ids, whole.ids)
    torch.testing.assert_close(chunked.log_probs, whole.log_probs, rtol=0, atol=1e-6)


def test_no_rows_give_no_candidates():
    head = CandidateHead(split_head(random_logits(321)), Processor(321), 8)
    assert [tuple(part.shape) for part in head(torch.empty(0, 20))] == [(0, 8), (0, 8)]


def test_nothing_is_read_back_to_the_host():
    head = CandidateHead(split_head(random_logits(321)), Processor(321, 0.5, 5.0), 8)
    with FakeTensorMode(allow_non_fake_inputs=True):  # its tensors have shapes but no values to read
        found = head(torch.empty(20, 20))
        with pytest.raises(DataDependentOutputException):
            found.ids.max().item()
    assert found.ids.shape == (20, 8)


def test_a_vocabulary_below_the_heads_own_bounds_the_ids():
    logits = random_logits(321)
    logits[:, 300:] += 100.0
    found = CandidateHead(split_head(logits), Processor(300), 8)(torch.eye(20))

    expected_ids, expected = ranking(logits[:, :300], 8)
    assert torch.equal(found.ids, expected_ids)
    torch.testing.assert_close(found.log_probs.double(), expected, rtol=0, atol=1e-6)


def test_a_head_without_shards_holds_the_whole_vocabulary():
    logits = random_logits(321)
    found = CandidateHead(SimpleNamespace(weight=logits.T), Processor(321), 8)(torch.eye(20))
    assert torch.equal(found.ids, ranking(logits, 8)[0])


def test_a_lora_wrapper_gives_the_base_heads_candidates():
    logits = random_logits(321)
    wrapper = SimpleNamespace(base_layer=split_head(logits), weight=torch.zeros(384, 20))
    assert torch.equal(CandidateHead(wrapper, Processor(321), 8)(torch.eye(20)).ids, ranking(logits, 8)[0])


def changed_head(**values):
    head = split_head(random_logits(321))
    vars(head).update(values)
    return head


def changed_processor(**values):
    processor = Processor(321)
    vars(processor).update(values)
    return processor


@pytest.mark.parametrize(
    ("head", "processor", "cap", "message"),
    [
        (changed_head(), Processor(321), 0, "--speculative-ddtree-topk-cap 0: .* from 1 to 321"),
        (changed_head(), Processor(321), 322, "--speculative-ddtree-topk-cap 322: .* from 1 to 321"),
        (changed_head(num_embeddings=337), Processor(321), 8, "16 tokens added .* serve a model whose own vocabulary"),
        (changed_head(), Processor(321, scale=-0.5), 8, "logit scale is above 0, it is -0.5"),
        (changed_head(), object(), 8, "it has object; serve this model with --speculative-algorithm DFLASH"),
        (SimpleNamespace(), Processor(321), 8, "has neither. Serve this model without speculation"),
        (None, Processor(321), 8, "NoneType has neither"),
        (
            SimpleNamespace(weight=torch.zeros(321, 20)),
            changed_processor(do_tensor_parallel_all_gather=True),
            8,
            "no shard_indices; use --tp-size 1",
        ),
        (
            changed_head(tp_size=4),
            changed_processor(do_tensor_parallel_all_gather_dp_attn=True),
            8,
            "add --enable-dp-lm-head",
        ),
    ],
)
def test_what_a_head_cannot_serve_is_refused_with_the_remedy(head, processor, cap, message):
    with pytest.raises(ValueError, match=message):
        CandidateHead(head, processor, cap)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_captured_graph_replays_to_the_eager_candidates(softcap):
    pytest.importorskip("sglang.srt")
    logits = random_logits(321).cuda()
    head = CandidateHead(split_head(logits), Processor(321, softcap=softcap), 8)
    hidden = torch.zeros(20, 20, device="cuda")
    head(hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = head(hidden)
    hidden.copy_(torch.eye(20))
    graph.replay()

    expected_ids, expected = ranking(logits, 8, softcap=softcap)
    assert torch.equal(found.ids, expected_ids)
    torch.testing.assert_close(found.log_probs.double(), expected, rtol=0, atol=1e-5)


def test_kept_candidates_of_a_short_part_end_in_places_that_sort_last():
    keys = top_candidates(torch.tensor([[-float("inf"), 1.0]]), 4, first_id=10).keys
    assert sorted(unpack_keys(keys[0, :2])[1].tolist()) == [10, 11]
    assert keys[0, 2:].max() < keys[0, :2].min()


if __name__ == "__main__":
    torch.set_num_threads(1)
    world, shared = int(sys.argv[1]), Path(sys.argv[2])
    torch.multiprocessing.start_processes(run_rank, args=(world, shared), nprocs=world, start_method="fork")
