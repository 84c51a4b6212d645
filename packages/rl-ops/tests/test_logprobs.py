"""selective_log_softmax, logps_and_entropy and entropy_from_logits against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import assert_close
from rl_ops import entropy_from_logits, logps_and_entropy, selective_log_softmax
from rl_ops.kernels import cpu, eager

INF = math.inf


def reference(logits: Tensor, index: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy the obvious way in float64, with 0 * log 0 = 0."""
    logps = (logits.double() / temperature).log_softmax(-1)
    p = logps.exp()
    entropy = -torch.where(p > 0, p * logps, 0.0).sum(-1)
    squeeze = index.dim() == logits.dim() - 1
    picked = logps.gather(-1, index.unsqueeze(-1) if squeeze else index)
    return picked.squeeze(-1) if squeeze else picked, entropy


@pytest.fixture(params=["compiled", "eager"])
def backend(request, monkeypatch):
    """Both ways through on the CPU; the compiled one is there if a compiler is."""
    if request.param == "eager":
        monkeypatch.setattr(cpu, "supports", lambda z, indices=0: False)
    return request.param


shapes = st.sampled_from([(), (1,), (5,), (2, 3), (0,), (2, 0), (2, 1, 3), (2, 2, 1, 2)])


@settings(max_examples=60, deadline=None)
@given(
    lead=shapes,
    width=st.sampled_from([1, 2, 15, 16, 17, 64, 257]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1e-4, 1.0, 30.0, 1e3]),
    indices=st.sampled_from([None, 0, 1, 3]),
    masked=st.booleans(),
    layout=st.sampled_from(["plain", "sliced", "transposed", "stepped"]),
    temperature=st.sampled_from([1.0, 0.3, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_value_and_gradient_of_any_input(
    lead, width, dtype, scale, indices, masked, layout, temperature, seed
):
    """A8, A12: shapes, types, strides, -inf, indices at both ends, magnitudes, empty batches."""
    torch.manual_seed(seed)
    logits = torch.randn(*lead, width, dtype=torch.float64) * scale
    index = torch.randint(0, width, lead if indices is None else (*lead, indices))
    if index.numel():
        index.view(-1)[0], index.view(-1)[-1] = 0, width - 1
    if masked and width > 2:
        logits[..., 1 : width - 1 : 3] = -INF
    logits = lay_out(logits.to(dtype), layout).requires_grad_()
    got = logps_and_entropy(logits, index, temperature=temperature)
    # autograd of the reference has 0 * inf at -inf, so it gets numbers whose exponential is 0
    low = -1e5 * (1 + scale)
    leaf = logits.detach().double().clamp(min=low).requires_grad_()
    wanted = reference(leaf, index, temperature)
    possible = logits.detach().gather(-1, index if indices is not None else index.unsqueeze(-1))
    possible = (possible > -INF).view(index.shape)
    assert got.logps.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(selective_log_softmax(logits, index, temperature=temperature), got.logps)
    # the float32 result itself is rounded to 2**-24 of its size
    picked = [torch.where(possible, x, 0.0) for x in (got.logps, wanted[0])]
    assert_close(*picked, rtol=5e-7, atol=5e-6)
    assert (got.logps[~possible] == -INF).all()
    assert_close(got.entropy, wanted[1], rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(wanted[0]), torch.randn_like(wanted[1])
    ends = zip(picked, (got.entropy, wanted[1]), (logits, leaf), strict=True)
    for logps, entropy, target in ends:
        total = (weights[0] * logps).sum() + (weights[1] * entropy).sum()
        total.backward(inputs=[target])
    if dtype in (torch.float32, torch.float64):
        assert_close(logits.grad, leaf.grad, rtol=1e-4, atol=2e-5 / temperature)
    assert logits.grad.isfinite().all()


def lay_out(logits: Tensor, layout: str) -> Tensor:
    """Give the same numbers other strides."""
    if layout == "sliced" and logits.dim() > 1:
        return torch.cat([logits, logits[..., -1:, :]], -2)[..., : logits.shape[-2], :].detach()
    if layout == "transposed" and logits.dim() > 1:
        return logits.transpose(0, -1).contiguous().transpose(0, -1).detach()
    if layout == "stepped":
        return logits.repeat_interleave(2, -1)[..., ::2].detach()
    return logits


@pytest.mark.parametrize("width", [49_152, 151_936])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-5)])
def test_error_at_real_vocabularies(backend, width, dtype, bound):
    torch.manual_seed(0)
    logits = (5 * torch.randn(4, width)).to(dtype)
    index = torch.randint(0, width, (4,))
    got = logps_and_entropy(logits, index)
    wanted = reference(logits, index)
    assert_close(got.logps, wanted[0], rtol=0, atol=bound)
    assert_close(got.entropy, wanted[1], rtol=0, atol=1e-5)


def test_half_precision_near_its_limit_is_finite(backend):
    """A8."""
    logits = torch.full((1, 4), 60_000.0, dtype=torch.float16)
    assert_close(selective_log_softmax(logits, torch.tensor([1])), [-math.log(4)])
    far = torch.tensor([[60_000.0, -60_000.0]], dtype=torch.float16)
    assert_close(selective_log_softmax(far, torch.tensor([1])), [-120_000.0])
    even = torch.tensor([[59_968.0, 60_000.0]])
    assert_close(selective_log_softmax(even, torch.tensor([0])), [-32.0])


def test_masked_vocabulary_counts_as_nothing(backend):
    """A12, and a token that cannot be sampled."""
    logits = torch.tensor([[0.0, -INF, 0.0], [-INF, 1.0, -INF]], requires_grad=True)
    logps, entropy = logps_and_entropy(logits, torch.tensor([0, 1]))
    assert_close(logps, [-math.log(2), 0.0])
    assert_close(entropy, [math.log(2), 0.0])
    (logps.sum() + entropy.sum()).backward()
    assert_close(logits.grad, [[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]])
    assert selective_log_softmax(logits, torch.tensor([1, 0])).detach().tolist() == [-INF, -INF]


def test_one_dimension_and_no_rows(backend):
    """A12."""
    row = torch.tensor([1.0, 2.0, 3.0])
    assert_close(selective_log_softmax(row, torch.tensor(2)), -0.4076059)
    assert selective_log_softmax(row, torch.tensor([2, 0])).shape == (2,)
    assert entropy_from_logits(row).shape == ()
    empty = torch.zeros(0, 5, requires_grad=True)
    logps = selective_log_softmax(empty, torch.zeros(0, dtype=torch.long))
    logps.sum().backward()
    assert logps.shape == (0,)
    assert empty.grad.shape == (0, 5)


def test_nan_logits_never_become_a_number(backend):
    logits = torch.zeros(2, 40)
    logits[0, 33] = math.nan
    logps, entropy = logps_and_entropy(logits, torch.tensor([0, 0]))
    assert logps.isnan().tolist() == [True, False]
    assert entropy.isnan().tolist() == [True, False]
    inf = selective_log_softmax(torch.tensor([[INF, 0.0]]), torch.tensor([1]))
    assert inf.isnan().all() or float(inf) == -INF


def test_a_row_without_gradient_is_inert_whatever_it_holds(backend):
    logits = torch.zeros(2, 20)
    logits[0] = math.nan
    logits.requires_grad_()
    logps = selective_log_softmax(logits, torch.tensor([0, 0]))
    torch.where(torch.tensor([False, True]), logps, 0.0).sum().backward()
    assert_close(logits.grad[0], torch.zeros(20))
    assert logits.grad[1].isfinite().all()


def test_repeated_indices_add_up(backend):
    logits = torch.randn(3, 50, dtype=torch.float64)
    index = torch.tensor([[4, 4, 49], [0, 0, 0], [1, 2, 1]])
    weights = torch.randn(3, 3)
    grads = []
    for make in (
        lambda x: selective_log_softmax(x.float(), index),
        lambda x: reference(x, index)[0],
    ):
        leaf = logits.clone().requires_grad_()
        (weights * make(leaf)).sum().backward()
        grads.append(leaf.grad)
    assert_close(grads[0], grads[1], atol=1e-6)


def test_many_indices_a_row_are_right():
    logits = torch.randn(2, 300, requires_grad=True)
    index = torch.randint(0, 300, (2, cpu.MOST_INDICES + 9))
    selective_log_softmax(logits, index).sum().backward()
    leaf = logits.detach().double().requires_grad_()
    reference(leaf, index)[0].sum().backward()
    assert_close(logits.grad, leaf.grad, atol=1e-4, rtol=1e-4)


def test_gradcheck_in_float64():
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 6], [3, 3], [2, 5]])
    assert torch.autograd.gradcheck(lambda x: logps_and_entropy(x, index, temperature=0.7), logits)
    assert torch.autograd.gradcheck(lambda x: selective_log_softmax(x, index), logits)
    assert torch.autograd.gradcheck(entropy_from_logits, logits)


@pytest.mark.parametrize("entropy", [True, False])
def test_ops_keep_the_contracts_of_custom_ops(entropy):
    logits = torch.randn(2, 3, 9, requires_grad=True)
    index = torch.randint(0, 9, (2, 3, 2))
    options = {"scale": 0.5, "entropy": entropy}
    torch.library.opcheck(torch.ops.rl_ops.logps_forward.default, (logits, index), options)
    *_, stats = torch.ops.rl_ops.logps_forward(logits.detach(), index, **options)
    h = torch.randn(2, 3)
    grads = torch.randn(2, 3, 3 if entropy else 2)
    args = grads, logits.detach(), index, stats, h
    torch.library.opcheck(torch.ops.rl_ops.logps_backward.default, args, {"scale": 0.5})


def test_compiles_without_a_graph_break():
    def loss(logits, index):
        logps, entropy = logps_and_entropy(logits, index, temperature=0.5)
        return (logps * 2).sum() + entropy.sum() + selective_log_softmax(logits, index).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    index = torch.randint(0, 11, (2, 3))
    grads = []
    for function in (compiled, loss):
        torch.manual_seed(0)
        logits = torch.randn(2, 3, 11, requires_grad=True)
        function(logits, index).backward()
        grads.append(logits.grad)
    assert_close(grads[0], grads[1])


def test_vmap_over_any_dimension():
    logits, index = torch.randn(4, 3, 10, requires_grad=True), torch.randint(0, 10, (4, 3))
    rows = torch.vmap(selective_log_softmax)(logits, index)
    assert_close(rows, selective_log_softmax(logits, index))
    columns = torch.vmap(logps_and_entropy, in_dims=(1, 1), out_dims=1)(logits, index)
    assert_close(columns.entropy, entropy_from_logits(logits))
    shared = torch.vmap(selective_log_softmax, in_dims=(0, None))(logits, index[0])
    assert_close(shared, selective_log_softmax(logits, index[:1].expand(4, 3)))
    (grad,) = torch.autograd.grad(rows.sum(), logits)
    (wanted,) = torch.autograd.grad(selective_log_softmax(logits, index).sum(), logits)
    assert_close(grad, wanted)


def test_fake_tensors_know_shapes_and_types():
    logits = torch.empty(2, 3, 9, device="meta", dtype=torch.bfloat16)
    index = torch.empty(2, 3, 4, device="meta", dtype=torch.long)
    logps, entropy = logps_and_entropy(logits, index)
    assert (logps.shape, logps.dtype, entropy.shape) == ((2, 3, 4), torch.float32, (2, 3))


@pytest.mark.parametrize(
    ("logits", "index", "options", "said"),
    [
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), {}, r"pass \[2\]"),
        (torch.zeros(2, 3), torch.zeros(2), {}, "integer type"),
        (
            torch.zeros(2, 3),
            torch.zeros(2, dtype=torch.long),
            {"temperature": 0.0},
            "temperature is 0.0",
        ),
        (
            torch.zeros(2, 3, dtype=torch.long),
            torch.zeros(2, dtype=torch.long),
            {},
            "floating-point",
        ),
        (torch.zeros(2, 0), torch.zeros(2, dtype=torch.long), {}, "last dimension"),
        (torch.tensor(1.0), torch.tensor(0), {}, "last dimension"),
    ],
)
def test_bad_arguments_are_refused(logits, index, options, said):
    with pytest.raises(ValueError, match=said):
        selective_log_softmax(logits, index, **options)


@pytest.mark.parametrize("bad", [-100, -1, 3])
def test_an_index_outside_the_vocabulary_is_refused(bad):
    with pytest.raises(IndexError, match=f"index holds {bad}, the vocabulary has 3"):
        selective_log_softmax(torch.zeros(2, 3), torch.tensor([0, bad]))


def test_forward_needs_no_memory_of_the_size_of_the_logits(peak_bytes):
    """Also for a slice that is not contiguous, the shifted logits of every causal model."""
    logits = torch.randn(2, 128, 49_152)  # 50 MB
    index = torch.randint(0, 49_152, (2, 128))
    added = peak_bytes(lambda: selective_log_softmax(logits[:, 1:], index[:, 1:]))
    naive = peak_bytes(lambda: logits[:, 1:].log_softmax(-1))
    assert naive > 0.9 * logits.nbytes  # so that this measure is known to see it
    assert added < (0.01 if cpu.library() is not None else 0.1) * logits.nbytes


def test_backward_holds_the_one_gradient_it_owes(peak_bytes):
    logits = torch.randn(2, 128, 49_152, requires_grad=True)
    index = torch.randint(0, 49_152, (2, 128))
    added = peak_bytes(lambda: selective_log_softmax(logits, index).sum().backward())
    assert added < 1.1 * logits.nbytes


def test_eager_blocks_are_no_larger_than_the_cache():
    assert eager.BLOCK_NUMBERS * 4 <= 2**20
