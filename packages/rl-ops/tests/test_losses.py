"""One table of losses, and the invariants that every one of them must keep.

A new loss gets its tests by a row in ``CASES``: how it is called, its formula in float64 written
another way, and the value at one small input worked out by hand.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from rl_ops import losses
from rl_ops.losses import loss_denominator, reduce_loss, sequence_logps

Batch = dict[str, Tensor]


class Case(NamedTuple):
    """A loss: how it is called on a batch, its formula, its value by hand on ``hand_batch``."""

    name: str
    call: Callable[[Batch], Tensor]
    formula: Callable[[Batch], Tensor]
    by_hand: float
    splits: bool = True

    @property
    def trained(self) -> tuple[str, ...]:
        if self.name in ROW_LOSSES:
            return (
                ("logps",)
                if self.name == "kto" or "unpaired" in self.name
                else ("logps", "rejected")
            )
        return ("logps",)


ROW_LOSSES = {
    "sigmoid", "sigmoid_smoothed", "sigmoid_norm", "hinge", "ipo", "kto_pair", "robust",
    "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
    "discopop", "simpo", "orpo", "cpo",
    "kto", "apo_zero_unpaired", "bradley_terry",
}  # fmt: skip


def sequence(b: Batch, name: str) -> Tensor:
    return sequence_logps(b[name], b["mask"])


def pair(
    loss: Callable[..., Tensor], *, lengths: bool = False, **options: float
) -> Callable[[Batch], Tensor]:
    def call(b: Batch) -> Tensor:
        extra = (
            {"chosen_lengths": b["mask"].sum(-1), "rejected_lengths": 2 * b["mask"].sum(-1)}
            if lengths
            else {}
        )
        rows = [sequence(b, n) for n in ("logps", "rejected", "ref", "ref_rejected")]
        return loss(*rows, beta=0.5, **extra, **options)

    return call


def free(
    loss: Callable[..., Tensor], names: tuple[str, ...], **options: float
) -> Callable[[Batch], Tensor]:
    def call(b: Batch) -> Tensor:
        known = {"chosen_lengths": b["mask"].sum(-1), "rejected_lengths": 2 * b["mask"].sum(-1)}
        return loss(
            sequence(b, "logps"), sequence(b, "rejected"), **{n: known[n] for n in names}, **options
        )

    return call


def policy(loss: Callable[..., Tensor], **options: float) -> Callable[[Batch], Tensor]:
    return lambda b: loss(b["logps"], b["old"], b["advantages"], b["mask"], **options)


def s(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def total(b: Batch, name: str) -> Tensor:
    return (b[name] * b["mask"]).sum(-1)


def h_w(b: Batch) -> Tensor:
    return total(b, "logps") - total(b, "ref")


def h_l(b: Batch) -> Tensor:
    return total(b, "rejected") - total(b, "ref_rejected")


def z(b: Batch) -> Tensor:
    return 0.5 * (h_w(b) - h_l(b))


def length(b: Batch) -> Tensor:
    return b["mask"].sum(-1)


def ratio(b: Batch) -> Tensor:
    return torch.exp(b["logps"] - b["old"])


def clipped(r: Tensor, b: Batch, low: float, high: float, delta: float = math.inf) -> Tensor:
    a = b["advantages"].view(-1, *(1,) * (r.dim() - 1))
    unclipped, bounded = r.clamp(max=delta) * a, r.clamp(low, high) * a
    return torch.where(unclipped < bounded, -unclipped, -bounded)


def surrogate(b: Batch) -> Tensor:
    return clipped(ratio(b), b, 0.8, 1.2) * b["mask"]


def mean_ratio(b: Batch) -> Tensor:
    return torch.exp(total(b, "logps") / length(b) - total(b, "old") / length(b))


def log_odds(a: Tensor) -> Tensor:
    return torch.log(torch.exp(a) / (1 - torch.exp(a)))


def sorted_gap(b: Batch) -> Tensor:
    gap = total(b, "logps") - total(b, "rejected")
    return torch.sort(gap)[0] - torch.sort(total(b, "ref") - total(b, "ref_rejected"))[0]


def vespo_formula(b: Batch) -> Tensor:
    w = torch.exp(total(b, "logps") - total(b, "old")).detach()[:, None]
    a = b["advantages"][:, None]
    phi = torch.where(
        a >= 0, math.exp(3) * w**2 * torch.exp(-3 * w), math.exp(2) * w**3 * torch.exp(-2 * w)
    )
    return -phi * a * b["logps"] * b["mask"]


def sapo_formula(b: Batch) -> Tensor:
    a = b["advantages"][:, None]
    tau = 1.05 - 0.05 * (a > 0).double()
    return -a * s(tau * (ratio(b) - 1)) * 4 / tau * b["mask"]


def value_formula(b: Batch) -> Tensor:
    v, old, target = b["logps"], b["old"], b["ref"]
    near = old + (v - old).clamp(-0.2, 0.2)
    return 0.5 * torch.stack([(v - target) ** 2, (near - target) ** 2]).amax(0) * b["mask"]


def kto_formula(b: Batch, kl: float) -> Tensor:
    return torch.where(b["labels"], 1 - s(0.5 * (h_w(b) - kl)), 1 - s(0.5 * (kl - h_w(b))))


def disco_formula(b: Batch) -> Tensor:
    m = s(z(b) / 0.05)
    return -(1 - m) * torch.log(s(z(b))) + m * torch.exp(-z(b))


def exo_formula(b: Batch) -> Tensor:
    q = s(z(b))
    return q * torch.log(q / 0.9) + (1 - q) * torch.log((1 - q) / 0.1)


def reward_formula(b: Batch) -> Tensor:
    c, r = total(b, "logps"), total(b, "rejected")
    return -torch.log(s(c - r - 0.5)) + 0.1 * (c + r) ** 2


def kto_call(b: Batch) -> Tensor:
    return losses.kto(sequence(b, "logps"), sequence(b, "ref"), b["labels"], kl=0.25, beta=0.5)


def unpaired_call(b: Batch) -> Tensor:
    return losses.apo_zero_unpaired(sequence(b, "logps"), sequence(b, "ref"), b["labels"], beta=0.5)


def reward_call(b: Batch) -> Tensor:
    margin = torch.full_like(sequence(b, "ref"), 0.5)
    return losses.bradley_terry(
        sequence(b, "logps"), sequence(b, "rejected"), margin=margin, centering=0.1
    )


def pp_baseline_call(b: Batch) -> Tensor:
    rows = (b[n] for n in ("logps", "old", "advantages", "mask", "ref"))
    return losses.reinforce_pp_baseline(*rows, beta=0.5)


def value_call(b: Batch) -> Tensor:
    return losses.clipped_value(b["logps"], b["old"], b["ref"], b["mask"])


R = math.exp(0.5)
CASES = [
    Case("nll", lambda b: losses.nll(b["logps"], b["mask"]),
         lambda b: -b["logps"] * b["mask"], 1.0),
    Case("dft", lambda b: losses.dft(b["logps"], b["mask"]),
         lambda b: -torch.exp(b["logps"]).detach() * b["logps"] * b["mask"], 0.3678794),
    # by hand: logps -1, old -1.5, advantage 2, so r = exp(0.5) = 1.6487;
    # the pair -3 | -5 against the reference -4 | -4.5
    Case("grpo", policy(losses.grpo), surrogate, -2.4),
    Case("grpo_delta", policy(losses.grpo, epsilon_high=0.8, delta=1.9),
         lambda b: clipped(ratio(b), b, 0.8, 1.8, 1.9) * b["mask"], -2 * R),
    Case("bnpo", policy(losses.bnpo), surrogate, -2.4),
    Case("dr_grpo", policy(losses.dr_grpo), surrogate, -2.4),
    Case("dapo", policy(losses.dapo, epsilon_high=0.28),
         lambda b: clipped(ratio(b), b, 0.8, 1.28) * b["mask"], -2.56),
    Case("ppo", policy(losses.ppo, dual_clip=3.0),
         lambda b: torch.where((b["advantages"] < 0)[:, None], torch.minimum(
             surrogate(b), -3 * b["advantages"][:, None]), surrogate(b)) * b["mask"], -2.4),
    Case("reinforce_pp", policy(losses.reinforce_pp), surrogate, -2.4),
    Case("reinforce_pp_baseline", pp_baseline_call,
         lambda b: surrogate(b) + 0.25 * (b["logps"] - b["ref"]) ** 2 * b["mask"], -2.4 + 0.25 / 9),
    Case("cispo", policy(losses.cispo, epsilon_high=1.5),
         lambda b: -ratio(b).detach().clamp(max=1.5) * b["advantages"][:, None]
         * b["logps"] * b["mask"], 3.0),
    Case("gspo", policy(losses.gspo, epsilon=0.2, epsilon_high=0.8),
         lambda b: clipped(mean_ratio(b), b, 0.8, 1.8)[:, None] * b["mask"], -2 * R),
    Case("luspo", policy(losses.luspo, epsilon=0.2, epsilon_high=0.8),
         lambda b: clipped(mean_ratio(b), b, 0.8, 1.8)[:, None] * b["mask"], -2 * R),
    Case("sapo", policy(losses.sapo), sapo_formula, -5.2537780),
    # w = exp(3 * 0.5), phi = exp(3 + 2 * 1.5 - 3 * w)
    Case("vespo", policy(losses.vespo), vespo_formula, 2 * math.exp(6 - 3 * math.exp(1.5))),
    Case("rloo", policy(losses.rloo),
         lambda b: clipped(torch.exp(total(b, "logps") - total(b, "old")), b, 0.8, 1.2), -2.4),
    Case("clipped_value", value_call, value_formula, 0.5 * max((1 / 3) ** 2, (1.3 - 4 / 3) ** 2)),
    Case("sigmoid", pair(losses.sigmoid), lambda b: -torch.log(s(z(b))), 0.3868710),
    Case("sigmoid_smoothed", pair(losses.sigmoid, label_smoothing=0.1),
         lambda b: -0.9 * torch.log(s(z(b))) - 0.1 * torch.log(s(-z(b))), 0.4618710),
    Case("sigmoid_norm", pair(losses.sigmoid_norm, lengths=True),
         lambda b: torch.log1p(torch.exp(-0.5 * (h_w(b) - h_l(b) / 2) / length(b))), 0.5943961),
    Case("hinge", pair(losses.hinge), lambda b: (1 - z(b)).clamp(min=0), 0.25),
    Case("ipo", pair(losses.ipo, lengths=True),
         lambda b: ((h_w(b) - h_l(b) / 2) / length(b) - 1) ** 2, (1 / 3 + 0.5 / 6 - 1) ** 2),
    Case("kto_pair", pair(losses.kto_pair, chosen_kl=1.0, rejected_kl=0.0),
         lambda b: (2 - s(0.5 * h_w(b)) - s(0.5 * (1 - h_l(b)))) / 2, 0.3491810),
    Case("robust", pair(losses.robust, label_smoothing=0.1),
         lambda b: (-0.9 * torch.log(s(z(b))) + 0.1 * torch.log(s(-z(b)))) / 0.8, 0.2931210),
    Case("exo_pair", pair(losses.exo_pair, label_smoothing=0.1), exo_formula, 0.1827900),
    Case("nca_pair", pair(losses.nca_pair), lambda b: -torch.log(s(0.5 * h_w(b))) - 0.5 * torch.log(
        s(-0.5 * h_w(b)) * s(-0.5 * h_l(b))), 1.2490852),
    Case("bco_pair", pair(losses.bco_pair),
         lambda b: -torch.log(s(0.5 * h_w(b)) * s(-0.5 * h_l(b))), 1.0500164),
    Case("sppo_hard", pair(losses.sppo_hard),
         lambda b: (h_w(b) - 1) ** 2 + (h_l(b) + 1) ** 2, 0.25),
    Case("aot", pair(losses.aot),
         lambda b: -torch.log(s(0.5 * sorted_gap(b))), 0.3868710, splits=False),
    Case("aot_unpaired", pair(losses.aot_unpaired), lambda b: -torch.log(
        s(0.5 * (torch.sort(h_w(b))[0] - torch.sort(h_l(b))[0]))), 0.3868710, splits=False),
    Case("apo_zero", pair(losses.apo_zero),
         lambda b: 1 - s(0.5 * h_w(b)) + s(0.5 * h_l(b)), 0.8153642),
    Case("apo_down", pair(losses.apo_down), lambda b: s(0.5 * h_w(b)) + 1 - s(z(b)), 0.9432806),
    Case("discopop", pair(losses.discopop), disco_formula, 0.4723665),
    Case("simpo", free(losses.simpo, ("chosen_lengths", "rejected_lengths")),
         lambda b: torch.log1p(torch.exp(
             1 - 2 * (total(b, "logps") - total(b, "rejected") / 2) / length(b))),
         math.log1p(math.exp(1 - 2 * (-1 + 5 / 6)))),
    Case("cpo", free(losses.cpo, ("chosen_lengths",), beta=0.5),
         lambda b: torch.log1p(torch.exp(-0.5 * (total(b, "logps") - total(b, "rejected"))))
         - total(b, "logps") / length(b), math.log1p(math.exp(-1)) + 1),
    Case("orpo", free(losses.orpo, ("chosen_lengths", "rejected_lengths"), beta=0.5),
         lambda b: -total(b, "logps") / length(b) - 0.5 * torch.log(s(
             log_odds(total(b, "logps") / length(b))
             - log_odds(total(b, "rejected") / 2 / length(b)))),
         1.4209482),
    Case("kto", kto_call, lambda b: kto_formula(b, 0.25), 0.4073334),
    Case("apo_zero_unpaired", unpaired_call, lambda b: kto_formula(b, 0.0), 0.3775407),
    Case("bradley_terry", reward_call, reward_formula, math.log1p(math.exp(-1.5)) + 6.4),
]  # fmt: skip

every_loss = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def batch(dtype: torch.dtype = torch.float64, rows: int = 4) -> Batch:
    """Rows of 3 to 30 trained tokens."""
    torch.manual_seed(0)
    made = {
        n: -2 * torch.rand(rows, 30, dtype=torch.float64)
        for n in ("logps", "rejected", "ref", "ref_rejected")
    }
    made["old"] = made["logps"] + 0.4 * torch.randn(rows, 30, dtype=torch.float64)
    made = {name: values.to(dtype) for name, values in made.items()}
    lengths = torch.tensor([3, 30, 7, 12])[:rows]
    made["mask"] = (torch.arange(30) < lengths[:, None]).long()
    made["advantages"] = torch.tensor([1.5, -0.5, -2.0, 0.25], dtype=dtype)[:rows]
    made["labels"] = torch.tensor([True, False, False, True])[:rows]
    return made


def hand_batch() -> Batch:
    """One row of three tokens and a masked one; sums: policy -3 and -5, reference -4 and -4.5."""
    sums = {"logps": -3.0, "rejected": -5.0, "ref": -4.0, "ref_rejected": -4.5, "old": -4.5}
    made = {n: torch.tensor([[v / 3] * 3 + [-9.0]], dtype=torch.float64) for n, v in sums.items()}
    rest = {
        "mask": torch.tensor([[1, 1, 1, 0]]),
        "advantages": torch.tensor([2.0]),
        "labels": torch.tensor([True]),
    }
    return made | rest


def with_gradient(case: Case, b: Batch) -> tuple[Tensor, list[Tensor]]:
    leaves = [b[name].detach().clone().requires_grad_() for name in case.trained]
    values = case.call(b | dict(zip(case.trained, leaves, strict=True)))
    return values.detach(), list(torch.autograd.grad(values.sum(), leaves))


def pick(b: Batch, rows: list[int]) -> Batch:
    return {name: values[rows] for name, values in b.items()}


def test_every_public_loss_is_in_the_table() -> None:
    helpers = {
        "kto_kl",
        "f_divergence_score",
        "loss_denominator",
        "reduce_loss",
        "sequence_logps",
        "policy_diagnostics",
    }
    public = {n for n in losses.__all__ if inspect.isfunction(getattr(losses, n))} - helpers
    assert public == {c.name for c in CASES} - {"grpo_delta", "sigmoid_smoothed"}


@every_loss
def test_value_worked_out_by_hand(case: Case) -> None:
    values = case.call(hand_batch())
    assert_close(values.flatten()[0], case.by_hand, rtol=1e-6)


@every_loss
def test_value_and_gradient_are_those_of_the_formula_in_float64(case: Case) -> None:
    b = batch()
    values, gradients = with_gradient(case, b)
    expected, expected_gradients = with_gradient(case._replace(call=case.formula), b)
    assert_close(values, expected, rtol=1e-9, atol=1e-9)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@every_loss
def test_gradient_in_float32_is_that_of_float64(case: Case) -> None:
    """Also at ratio 1, where a sum of two branches of exp once cancelled to a gradient of 0."""
    for fresh in (False, True):
        b = batch()
        b["old"] = b["logps"].clone() if fresh else b["old"]
        narrow = {n: v.float() if v.is_floating_point() else v for n, v in b.items()}
        _, wanted = with_gradient(case._replace(call=case.formula), b)
        _, got = with_gradient(case, narrow)
        for mine, theirs in zip(got, wanted, strict=True):
            assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            assert theirs.abs().sum() > 0


def test_policy_gradient_at_ratio_one_is_minus_the_advantage() -> None:
    for name in (
        "grpo",
        "bnpo",
        "dr_grpo",
        "dapo",
        "ppo",
        "reinforce_pp",
        "gspo",
        "luspo",
        "cispo",
    ):
        logps = torch.full((1, 2), -1.0, requires_grad=True)
        loss = getattr(losses, name)(logps, logps.detach(), torch.tensor([0.75]), torch.ones(1, 2))
        (gradient,) = torch.autograd.grad(loss.sum(), logps)
        assert_close(gradient, [[-0.75, -0.75]])


@every_loss
def test_half_precision_is_widened_before_anything_is_computed(case: Case) -> None:
    b = batch(torch.bfloat16)
    widened = {n: v.double() if v.is_floating_point() else v for n, v in b.items()}
    values = case.call(b)
    assert values.dtype == torch.float32
    assert_close(values, case.formula(widened), rtol=1e-4, atol=1e-5)


@every_loss
def test_masked_positions_are_inert_whatever_they_hold(case: Case) -> None:
    """A6, A9, E9: also -1 against -100, where exp overflows."""
    b = batch(torch.float32)
    outside = b["mask"] == 0
    values, gradients = with_gradient(case, b)
    for garbage in (math.nan, math.inf, -math.inf, -100.0):
        spoiled = {
            n: v.masked_fill(outside, garbage) if v.dim() == 2 and n != "mask" else v
            for n, v in b.items()
        }
        spoiled["logps"] = b["logps"].masked_fill(outside, -1.0 if garbage == -100.0 else garbage)
        again, again_gradients = with_gradient(case, spoiled)
        assert torch.equal(again, values)
        if values.dim() == 2:
            assert torch.equal(again[outside], torch.zeros_like(again[outside]))
        for got, wanted in zip(again_gradients, gradients, strict=True):
            assert torch.equal(got, wanted)
            assert torch.equal(got[outside], torch.zeros_like(got[outside]))


@pytest.mark.parametrize(
    "mode", ["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"]
)
@every_loss
def test_any_split_of_the_step_gives_the_same_gradient(case: Case, mode: str) -> None:
    """A4: micro-batches, accumulation and ranks are all sums over parts with one denominator."""
    b = batch()
    splits = [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[1, 3], [0, 2]], [[2], [3, 1, 0]]]
    results = []
    for split in splits if case.splits else splits[:1]:
        leaf = b["logps"].detach().clone().requires_grad_()
        parts = [pick(b | {"logps": leaf}, rows) for rows in split]
        masks = [
            p["mask"].any(-1) if case.name in ROW_LOSSES | {"rloo"} else p["mask"] for p in parts
        ]
        longest = 30 if mode == "constant" else None
        step = sum(loss_denominator(m, mode=mode, max_length=longest) for m in masks)
        for part, mask in zip(parts, masks, strict=True):
            reduce_loss(case.call(part), mask, mode=mode, denominator=step).backward()
        results.append(leaf.grad)
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-9, atol=1e-12)


@every_loss
@pytest.mark.parametrize("gap", [-300.0, -30.0, 30.0, 300.0])
def test_extreme_log_ratios_give_finite_value_and_gradient(case: Case, gap: float) -> None:
    """A6, A7: unmasked this time."""
    b = batch(torch.float32)
    b["logps"] = b["ref"].clamp(max=-0.5)
    shifts = {"old": gap, "ref": gap, "rejected": -gap, "ref_rejected": gap / 2}
    far = b | {name: b[name] + shift for name, shift in shifts.items()}
    values, gradients = with_gradient(case, far)
    assert values.isfinite().all()
    assert all(g.isfinite().all() for g in gradients)


@every_loss
def test_unmasked_nan_is_an_error_that_names_its_row(case: Case) -> None:
    """A5."""
    b = batch(torch.float32)
    used = ("logps", "old", "ref", "rejected", "ref_rejected", "advantages")
    raised = 0
    for name in used:
        spoiled = b | {name: b[name].clone()}
        spoiled[name].view(4, -1)[2, 0] = math.nan
        if torch.equal(case.formula(spoiled).nan_to_num(nan=7.0), case.formula(b)):
            continue  # this loss does not look at it
        with pytest.raises(ValueError, match="row 2"):
            case.call(spoiled)
        raised += 1
    assert raised


def test_a_masked_nan_in_old_logps_is_inert_and_an_unmasked_one_is_named() -> None:
    """A5 to the letter."""
    logps, old = torch.zeros(1, 2, requires_grad=True), torch.tensor([[0.0, math.nan]])
    loss = losses.grpo(logps, old, torch.ones(1), torch.tensor([[1, 0]])).sum()
    loss.backward()
    assert loss.isfinite()
    assert_close(logps.grad, [[-1.0, 0.0]])
    with pytest.raises(ValueError, match="old_logps is nan at row 0, position 1"):
        losses.grpo(logps, old, torch.ones(1), torch.tensor([[1, 1]]))
