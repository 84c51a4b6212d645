"""What single losses promise beyond the table."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from closeness import assert_close
from rl_ops import losses


def test_ipo_does_not_depend_on_length() -> None:
    """F1: two pairs with the same gap a token, of 2 and of 20 tokens."""
    lengths = torch.tensor([2, 20])
    chosen, rejected = -1.0 * lengths, -1.5 * lengths
    values = losses.ipo(
        chosen, rejected, None, None, chosen_lengths=lengths, rejected_lengths=lengths
    )
    assert_close(values[0], values[1])
    assert_close(values[0], (0.5 - 5.0) ** 2)


def test_ipo_refuses_to_average_without_lengths() -> None:
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="chosen_lengths"):
        losses.ipo(zero, zero, zero, zero)
    with pytest.raises(ValueError, match="average=False"):
        losses.ipo(
            zero, zero, zero, zero, chosen_lengths=zero, rejected_lengths=zero, average=False
        )
    assert_close(losses.ipo(zero, zero, zero, zero, average=False), [25.0])


@pytest.mark.parametrize("label", [True, False])
def test_kto_with_one_kind_of_label_is_finite(label: bool) -> None:
    """F4."""
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    values = losses.kto(
        logps, torch.zeros(2), torch.tensor([label, label]), kl=losses.kto_kl(*[torch.zeros(2)] * 2)
    )
    values.mean().backward()
    assert values.isfinite().all()
    assert (logps.grad < 0).all() if label else (logps.grad > 0).all()


def test_kto_baseline_is_never_negative_and_carries_no_gradient() -> None:
    logps = torch.tensor([-3.0, -4.0], requires_grad=True)
    kl = losses.kto_kl(logps, torch.zeros(2))
    assert_close(kl, 0.0)
    assert not kl.requires_grad


@pytest.mark.parametrize(
    "name", ["sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "cpo"]
)
def test_label_smoothing_changes_the_loss(name: str) -> None:
    """F5, the losses that have it."""
    loss = getattr(losses, name)
    names = inspect.signature(loss).parameters
    rows = [torch.tensor([-1.0]), torch.tensor([-3.0])]
    if "ref_chosen_logps" in names:
        rows += [torch.tensor([-1.5]), torch.tensor([-1.5])]
    lengths = {n: torch.tensor([2]) for n in ("chosen_lengths", "rejected_lengths") if n in names}
    plain = loss(*rows, **lengths, label_smoothing=1e-3)
    assert abs(float(loss(*rows, **lengths, label_smoothing=0.1) - plain)) > 1e-3
    with pytest.raises(ValueError, match="label_smoothing"):
        loss(*rows, **lengths, label_smoothing=0.7)


@pytest.mark.parametrize(
    "name",
    [
        "hinge",
        "ipo",
        "kto_pair",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
        "orpo",
    ],
)
def test_label_smoothing_is_refused_where_it_means_nothing(name: str) -> None:
    """F5, the losses that do not."""
    with pytest.raises(TypeError, match="label_smoothing"):
        getattr(losses, name)(*[torch.zeros(1)] * 4, label_smoothing=0.1)


def test_exo_at_no_smoothing_is_refused() -> None:
    with pytest.raises(ValueError, match="infinite"):
        losses.exo_pair(*[torch.zeros(1)] * 4, label_smoothing=0.0)


def test_fresh_samples_give_ratio_one_and_a_reinforce_gradient() -> None:
    """A11."""
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    values = losses.grpo(logps, logps.detach(), torch.tensor([0.5]), torch.ones(1, 2))
    values.sum().backward()
    assert_close(values, [[-0.5, -0.5]])
    assert_close(logps.grad, [[-0.5, -0.5]])
    seen = losses.policy_diagnostics(logps, logps, torch.ones(1, 2))
    assert_close(torch.stack(list(seen)), [1, 1, 1, 0, 0, 0])


def test_diagnostics_count_what_the_clip_stops() -> None:
    log_ratio = torch.tensor([[math.log(1.5), math.log(0.5), 0.0, math.nan]])
    mask = torch.tensor([[1, 1, 1, 0]])
    seen = losses.policy_diagnostics(log_ratio, torch.zeros(1, 4), mask)
    assert_close([seen.ratio_mean, seen.ratio_min, seen.ratio_max], [1.0, 0.5, 1.5])
    assert_close([seen.clip_fraction_low, seen.clip_fraction_high], [1 / 3, 1 / 3])
    assert_close(seen.approx_kl, (1.5 - 1 - math.log(1.5) + 0.5 - 1 - math.log(0.5)) / 3)
    up = losses.policy_diagnostics(
        log_ratio, torch.zeros(1, 4), mask, advantages=torch.tensor([1.0])
    )
    assert_close([up.clip_fraction_low, up.clip_fraction_high], [0.0, 1 / 3])
    none = losses.policy_diagnostics(log_ratio, log_ratio, torch.zeros(1, 4))
    assert_close([none.ratio_mean, none.ratio_min, none.ratio_max], [1.0, 1.0, 1.0])


def test_per_token_advantages_are_taken_as_they_are() -> None:
    logps = torch.zeros(1, 2)
    values = losses.grpo(logps, logps, torch.tensor([[1.0, -3.0]]), torch.ones(1, 2))
    assert_close(values, [[-1.0, 3.0]])


def test_gspo_has_the_gradient_of_the_sequence_ratio() -> None:
    logps = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    old = torch.tensor([[-1.1, -1.9, -3.2]])
    mask = torch.ones(1, 3)
    values = losses.gspo(logps, old, torch.tensor([2.0]), mask, epsilon=0.5, epsilon_high=0.5)
    (grad,) = torch.autograd.grad(values.sum() / 3, logps)
    sequence = -2.0 * torch.exp((logps - old).mean())
    (wanted,) = torch.autograd.grad(sequence, logps)
    assert_close(grad, wanted)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: losses.grpo(x, x, torch.ones(1), x, delta=1.1), "delta"),
        (lambda x: losses.grpo(x, x, torch.ones(1), x, epsilon=-1.0), "epsilon"),
        (lambda x: losses.grpo(x, x[:, :1], torch.ones(1), x), "old_logps has shape"),
        (lambda x: losses.grpo(x, x, torch.ones(3), x), "advantages have shape"),
        (lambda x: losses.rloo(x, x, torch.ones(1, 2), x), "one a row"),
        (lambda x: losses.ppo(x, x, torch.ones(1), x, dual_clip=0.5), "dual_clip"),
        (lambda x: losses.sapo(x, x, torch.ones(1), x, temperature_pos=0.0), "temperatures"),
        (lambda x: losses.reinforce_pp_baseline(x, x, torch.ones(1), x, beta=0.1), "go together"),
        (lambda x: losses.discopop(*[x[0]] * 4, tau=2.0), "tau"),
        (lambda x: losses.cpo(x[0], x[0]), "nll_weight"),
        (lambda x: losses.sigmoid(x[0], x[0], x[0][:1], x[0]), "ref_chosen_logps has shape"),
        (lambda x: losses.f_divergence_score(x[0], kind="tv"), "reverse_kl"),
    ],
)
def test_bad_arguments_are_refused_in_one_clear_line(call, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        call(torch.ones(1, 2))
    assert "\n" not in str(raised.value)


def test_f_divergence_scores_are_derivatives_at_the_ratio() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    u = x.exp()
    assert_close(losses.f_divergence_score(x), x)
    assert_close(losses.f_divergence_score(x, kind="forward_kl"), 1 - 1 / u)
    assert_close(losses.f_divergence_score(x, kind="js_divergence"), torch.log(2 * u / (1 + u)))
    assert_close(
        losses.f_divergence_score(x, kind="alpha_divergence", alpha=0.3), (u**-0.7 - 1) / -0.7
    )
    assert_close(losses.f_divergence_score(x, kind="alpha_divergence", alpha=1.0), x)
    assert losses.f_divergence_score(torch.tensor([-500.0]), kind="forward_kl").isfinite().all()


def test_a_loss_compiles_without_a_graph_break() -> None:
    def step(logps, old, advantages, mask):
        values = losses.grpo(logps, old, advantages, mask)
        total = losses.loss_denominator(mask, mode="token_mean")
        return losses.reduce_loss(values, mask, mode="token_mean", denominator=total)

    args = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2), torch.ones(2, 3)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert_close(compiled(*args), step(*args))
