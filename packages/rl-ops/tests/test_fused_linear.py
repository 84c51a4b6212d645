"""The fused head against the head, its options and the log-softmax written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import assert_close
from rl_ops import linear_selective_log_softmax
from rl_ops.kernels import linear


def plain(hidden, weight, index, *, bias, temperature, softcap, scale, adapter):
    z = hidden @ weight.T
    if adapter is not None:
        a, b, scaling = adapter
        z = hidden @ (weight + scaling * b @ a).T
    if bias is not None:
        z = z + bias
    z = z * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logps = (z / temperature).log_softmax(-1)
    index = index.unsqueeze(-1) if index.dim() == hidden.dim() - 1 else index
    return logps.gather(-1, index), -(logps.exp() * logps).sum(-1)


@pytest.fixture(params=[0, 3000, linear.KEPT_BYTES], ids=["recomputed", "part kept", "kept"])
def many_chunks(request, monkeypatch):
    """Chunks of 5 rows and 12 entries of the vocabulary."""
    monkeypatch.setattr(linear, "CPU_CHUNK", (64, 5, 16))
    monkeypatch.setattr(linear, "KEPT_BYTES", request.param)


def leaves(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden": (13, 7), "weight": (50, 7), "bias": (50,), "a": (3, 7), "b": (50, 3)}
    return {n: torch.randn(size, dtype=dtype).requires_grad_() for n, size in sizes.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("hidden",)])
@pytest.mark.parametrize("indices", [None, 3])
def test_fused_and_plain_agree_over_all_options(
    many_chunks, bias, temperature, softcap, scale, adapter, frozen, indices
):
    """A10: values and every gradient, with entropy and without."""
    given_ = leaves()
    for name in frozen:
        given_[name].requires_grad_(False)
    low = (given_["a"], given_["b"], 0.5) if adapter else None
    row_bias = given_["bias"] if bias else None
    index = torch.randint(0, 50, (13,) if indices is None else (13, indices))
    trained = [
        x for x in (given_["hidden"], given_["weight"], row_bias, *(low or ())[:2]) if x is not None
    ]
    trained = [x for x in trained if x.requires_grad]
    options = {"temperature": temperature, "bias": row_bias, "adapter": low}
    logps, entropy = plain(
        given_["hidden"], given_["weight"], index, softcap=softcap, scale=scale, **options
    )
    weights = torch.randn(logps.shape).double(), torch.randn(13).double()
    for return_entropy in (False, True):
        got = linear_selective_log_softmax(
            given_["hidden"], given_["weight"], index, logit_softcap=softcap, logit_scale=scale,
            return_entropy=return_entropy, **options,
        )  # fmt: skip
        mine = got.logps if return_entropy else got
        total, wanted = (mine.view_as(logps) * weights[0]).sum(), (logps * weights[0]).sum()
        assert_close(mine.view_as(logps), logps, rtol=1e-10, atol=1e-10)
        if return_entropy:
            assert_close(got.entropy, entropy, rtol=1e-10, atol=1e-10)
            total, wanted = (
                total + (got.entropy * weights[1]).sum(),
                wanted + (entropy * weights[1]).sum(),
            )
        grads = torch.autograd.grad(total, trained)
        expected = torch.autograd.grad(wanted, trained, retain_graph=True)
        for one, other in zip(grads, expected, strict=True):
            assert_close(one, other, rtol=1e-9, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(
    lead=st.sampled_from([(), (1,), (3, 4), (0,), (2, 0)]),
    width=st.sampled_from([1, 5, 33]),
    size=st.sampled_from([1, 8]),
    magnitude=st.sampled_from([1e-3, 1.0, 100.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_magnitude(lead, width, size, magnitude, dtype, seed):
    """A12: empty batches too, forward and backward."""
    torch.manual_seed(seed)
    hidden = (magnitude * torch.randn(*lead, size)).to(dtype).requires_grad_()
    weight = torch.randn(width, size).to(dtype).requires_grad_()
    index = torch.randint(0, width, lead)
    logps = linear_selective_log_softmax(hidden, weight, index)
    logits = torch.nn.functional.linear(hidden.detach(), weight.detach()).double()
    wanted = logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    assert_close(logps, wanted, rtol=1e-5, atol=1e-5)
    logps.sum().backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert weight.grad.dtype == dtype


def test_masked_vocabulary_by_bias():
    """A12: a whole chunk of the vocabulary at -inf."""
    bias = torch.zeros(40)
    bias[:20] = -math.inf
    hidden, weight = torch.zeros(2, 3, requires_grad=True), torch.randn(40, 3)
    got = linear_selective_log_softmax(
        hidden, weight, torch.tensor([20, 39]), bias=bias, return_entropy=True
    )
    assert_close(got.logps, [-math.log(20)] * 2)
    assert_close(got.entropy, [math.log(20)] * 2)
    (got.logps.sum() + got.entropy.sum()).backward()
    assert hidden.grad.isfinite().all()


def test_rows_without_gradient_are_inert_whatever_they_hold(many_chunks):
    hidden, weight = torch.randn(7, 4), torch.randn(30, 4)
    index, mask = torch.randint(0, 30, (7,)), torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool()
    results = []
    for garbage in (0.0, math.nan, math.inf):
        h = hidden.masked_fill(~mask[:, None], garbage).requires_grad_()
        w = weight.clone().requires_grad_()
        logps = linear_selective_log_softmax(h, w, index)
        torch.where(mask, logps, 0.0).sum().backward()
        assert_close(h.grad[~mask], torch.zeros(3, 4))
        results.append((h.grad, w.grad))
    for other in results[1:]:
        assert_close(other[0], results[0][0])
        assert_close(other[1], results[0][1])


def test_a_frozen_weight_gets_no_gradient_and_costs_none(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the logits were computed again")

    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(30, 4)
    logps = linear_selective_log_softmax(hidden, weight, torch.arange(5))
    monkeypatch.setattr(linear, "backward", refuse)
    logps.sum().backward()
    reference = hidden.detach().clone().requires_grad_()
    (reference @ weight.T).log_softmax(-1)[torch.arange(5), torch.arange(5)].sum().backward()
    assert_close(hidden.grad, reference.grad, atol=1e-5)
    assert weight.grad is None


def test_nothing_is_kept_without_gradient():
    with torch.no_grad():
        leaf = torch.randn(3, 4, requires_grad=True)
        logps = linear_selective_log_softmax(leaf, torch.randn(9, 4), torch.tensor([0, 1, 2]))
    assert not logps.requires_grad


def test_autocast_multiplies_in_its_type_and_sums_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(6, 32, requires_grad=True)
    weight = torch.randn(300, 32, requires_grad=True)
    index = torch.randint(0, 300, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        logps = linear_selective_log_softmax(hidden, weight, index)
        logits = torch.nn.functional.linear(hidden, weight)
    assert logits.dtype == torch.bfloat16
    assert logps.dtype == torch.float32
    # the same rounded logits, their log-softmax in float64
    wanted = logits.double().log_softmax(-1).gather(-1, index[:, None]).squeeze(-1)
    assert_close(logps, wanted, atol=1e-5)
    logps.sum().backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    assert grads[0].dtype == grads[1].dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    (exact[0] @ exact[1].T).log_softmax(-1).gather(-1, index[:, None]).sum().backward()
    for mine, theirs in zip(grads, (x.grad for x in exact), strict=True):
        scale = theirs.abs().max()
        assert_close(mine / scale, theirs / scale, rtol=1e-2, atol=1e-2)


def test_gradcheck_in_float64(many_chunks):
    given_ = leaves()
    index = torch.randint(0, 50, (13, 2))

    def call(hidden, weight, bias, a, b):
        return linear_selective_log_softmax(
            hidden, weight, index, bias=bias, temperature=0.8, logit_softcap=3.0,
            return_entropy=True, adapter=(a, b, 0.5),
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, tuple(given_.values()), fast_mode=True)


@pytest.mark.parametrize("plan", [0, 1, 2])
@pytest.mark.parametrize("entropy", [False, True])
def test_ops_keep_the_contracts_of_custom_ops(plan, entropy):
    hidden, weight = torch.randn(5, 4), torch.randn(30, 4)
    (hidden if plan == 2 else weight).requires_grad_(plan > 0)
    options = {"scales": [1.0, 1.0, 0.0], "dtype": torch.float32, "entropy": entropy, "plan": plan}
    args = hidden, weight, torch.randint(0, 30, (5, 1)), None, []
    torch.library.opcheck(torch.ops.rl_ops.linear_logps_forward.default, args, options)


def test_compiles_without_a_graph_break_under_autocast_too():
    def loss(hidden, weight, index):
        got = linear_selective_log_softmax(
            hidden, weight, index, return_entropy=True, temperature=0.5, logit_softcap=30.0
        )
        return got.logps.sum() + got.entropy.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    index = torch.randint(0, 30, (2, 3))
    for enabled in (False, True):
        grads = []
        for function in (compiled, loss):
            torch.manual_seed(0)
            hidden = torch.randn(2, 3, 8, requires_grad=True)
            weight = torch.randn(30, 8, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                function(hidden, weight, index).backward()
            grads.append((hidden.grad, weight.grad))
        for one, other in zip(*grads, strict=True):
            assert_close(one, other)


def test_vmap():
    hidden, weight = (
        torch.randn(4, 3, 8, requires_grad=True),
        torch.randn(30, 8, requires_grad=True),
    )
    index = torch.randint(0, 30, (4, 3))
    call = torch.vmap(lambda h, i: linear_selective_log_softmax(h, weight, i))
    wanted = linear_selective_log_softmax(hidden, weight, index)
    assert_close(call(hidden, index), wanted)
    grads = torch.autograd.grad(call(hidden, index).sum(), (hidden, weight))
    for one, other in zip(grads, torch.autograd.grad(wanted.sum(), (hidden, weight)), strict=True):
        assert_close(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": torch.zeros(5, 3)}, "weight of shape"),
        ({"weight": torch.zeros(5, 4, dtype=torch.float64)}, "torch.autocast"),
        ({"bias": torch.zeros(4)}, "bias has shape"),
        ({"temperature": -1.0}, "temperature"),
        ({"logit_softcap": 0.0}, "logit_softcap"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"adapter": (torch.zeros(2, 4), torch.zeros(5, 3), 1.0)}, "adapter of shapes"),
        ({"index": torch.zeros(3, dtype=torch.long)}, "does not fit hidden"),
    ],
)
def test_bad_arguments_are_refused(changes, said):
    given_ = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(5, 4),
        "index": torch.zeros(2).long(),
    }
    with pytest.raises(ValueError, match=said):
        linear_selective_log_softmax(**(given_ | changes))
    with pytest.raises(IndexError, match="index holds 5"):
        linear_selective_log_softmax(**(given_ | {"index": torch.tensor([0, 5])}))


@pytest.mark.parametrize("width", [32_000, 128_000])
def test_peak_memory_is_bounded_whatever_the_vocabulary(width, peak_bytes):
    """The logits would take 125 and 500 MiB, three times over."""
    hidden = torch.randn(1024, 16, requires_grad=True)
    weight = torch.randn(width, 16, requires_grad=True)
    index = torch.zeros(1024).long()
    # what libraries set up once is not counted
    linear_selective_log_softmax(hidden[:2], weight, index[:2]).sum().backward()
    hidden.grad = weight.grad = None
    added = peak_bytes(lambda: linear_selective_log_softmax(hidden, weight, index).sum().backward())
    assert added - hidden.nbytes - weight.nbytes < 128 * 2**20
