"""Preference losses on pairs. All return ``[B]``.

Common arguments: ``chosen_logps``, ``rejected_logps`` of the policy and ``ref_chosen_logps``,
``ref_rejected_logps`` of the reference, each ``[B]`` and *summed* over the completion
(:func:`rl_ops.losses.sequence_logps`); a reference of None counts as 0 (reference-free). Losses
that average per token take the lengths and divide themselves. Below, ``h_w`` and ``h_l`` are policy
minus reference for the chosen and the rejected one, ``d = h_w - h_l``. A number that is not finite
raises ValueError with its row. A loss takes ``label_smoothing`` only where its paper defines it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_ops.kl import bounded_exp
from rl_ops.losses._inputs import finite_rows
from rl_ops.losses._pairs import per_token, smoothed_logistic, smoothing

__all__ = [
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "bco_pair",
    "discopop",
    "exo_pair",
    "hinge",
    "ipo",
    "kto_pair",
    "nca_pair",
    "robust",
    "sigmoid",
    "sigmoid_norm",
    "sppo_hard",
]


def sigmoid(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Logistic loss of DPO.

    ``-(1 - e) * log sigmoid(beta * d) - e * log sigmoid(-beta * d)``.

    Rafailov et al. 2023 (arXiv:2305.18290, equation 7); with ``e = label_smoothing > 0`` the
    conservative form of Mitchell 2023 ("A note on DPO with noisy preferences").

    Example:
        >>> zero = torch.zeros(1)
        >>> sigmoid(zero, zero, zero, zero)
        tensor([0.6931])
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return smoothed_logistic(beta * (h_w - h_l), label_smoothing)


def sigmoid_norm(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """DPO with averaged gaps: ``-log sigmoid(beta * (h_w / |y_w| - h_l / |y_l|))``.

    Length-normalised DPO as in Tulu 3 (Lambert et al. 2024, arXiv:2411.15124, equation 6).
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    d = per_token(h_w, chosen_lengths) - per_token(h_l, rejected_lengths)
    return smoothed_logistic(beta * d, label_smoothing)


def hinge(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Hinge ``max(0, 1 - beta * d)``.

    RSO (Liu et al. 2023, arXiv:2309.06657, equation 11), after SLiC.
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return torch.relu(1 - beta * (h_w - h_l))


def ipo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    beta: float = 0.1,
    average: bool = True,
) -> Tensor:
    """``(d - 1 / (2 * beta))**2``, each gap averaged over its tokens by default.

    IPO (Azar et al. 2023, arXiv:2310.12036, equation 17, where beta is called tau). Summed gaps
    grow with the length while the target does not; the authors confirmed that theirs are averages.

    Args:
        chosen_logps: ``[B]``, summed.
        rejected_logps: ``[B]``, summed.
        ref_chosen_logps: ``[B]`` or None.
        ref_rejected_logps: ``[B]`` or None.
        chosen_lengths: ``[B]``, tokens in each chosen completion.
        rejected_lengths: ``[B]``.
        beta: the margin aimed at is ``1 / (2 * beta)``.
        average: False takes the sums, and no lengths.

    Raises:
        ValueError: lengths missing with ``average``, or given without it.
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    lengths = chosen_lengths, rejected_lengths
    if any((x is not None) != average for x in lengths):
        raise ValueError(
            f"average={average}: pass chosen_lengths and rejected_lengths to average, "
            "or average=False and neither"
        )
    if chosen_lengths is not None and rejected_lengths is not None:
        h_w, h_l = per_token(h_w, chosen_lengths), per_token(h_l, rejected_lengths)
    return (h_w - h_l - 1 / (2 * beta)).square()


def kto_pair(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    chosen_kl: Tensor | float | None = None,
    rejected_kl: Tensor | float | None = None,
    beta: float = 0.1,
) -> Tensor:
    """KTO on pairs, each against the KL of the other side.

    The mean of ``1 - sigmoid(beta * (h_w - z_l))`` and ``1 - sigmoid(beta * (z_w - h_l))``.

    The paired form in the reference code of Ethayarajh et al. 2024 (arXiv:2402.01306). ``z_w``,
    ``z_l`` are ``max(0, mean(h))`` over chosen and rejected rows without gradient; they are taken
    from this batch unless given, so give those of the whole step when it is split.
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    z_w = _batch_kl(h_w) if chosen_kl is None else chosen_kl
    z_l = _batch_kl(h_l) if rejected_kl is None else rejected_kl
    return 0.5 * (torch.sigmoid(-beta * (h_w - z_l)) + torch.sigmoid(-beta * (z_w - h_l)))


def robust(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """DPO's loss made unbiased under flipped labels.

    ``(-(1 - e) * log sigmoid(beta * d) + e * log sigmoid(-beta * d)) / (1 - 2 * e)``.

    Robust DPO (Chowdhury et al. 2024, arXiv:2403.00409, equation 10); ``e = label_smoothing`` is
    the fraction of pairs whose label is flipped, below 0.5.
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    e = smoothing(label_smoothing)
    z = beta * (h_w - h_l)
    return (e * logsigmoid(-z) - (1 - e) * logsigmoid(z)) / (1 - 2 * e)


def exo_pair(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
) -> Tensor:
    """The reverse KL from the policy's preference to the (smoothed) label.

    ``q * (log q - log(1 - e)) + (1 - q) * (log(1 - q) - log e)`` with ``q = sigmoid(beta * d)``:
    EXO-pref (Ji et al. 2024, arXiv:2402.00856, equation 16). ``e = label_smoothing`` must be above
    0: at 0 the loss is infinite.
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    e = smoothing(label_smoothing)
    if e == 0:
        raise ValueError(
            "label_smoothing is 0, at which exo_pair is infinite: pass a small positive one, 1e-3"
        )
    z = beta * (h_w - h_l)
    win = torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-e))
    return win + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(e))


def nca_pair(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Noise contrast, which keeps the likelihood of the chosen one up.

    ``-log s(beta*h_w) - 0.5 * log s(-beta*h_w) - 0.5 * log s(-beta*h_l)``, s the sigmoid.

    NCA (Chen et al. 2024, arXiv:2402.05369, equation 11 with two answers).
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    pull_down = logsigmoid(-beta * h_w) + logsigmoid(-beta * h_l)
    return -logsigmoid(beta * h_w) - 0.5 * pull_down


def bco_pair(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
    reward_shift: Tensor | float = 0.0,
) -> Tensor:
    """A binary classifier on the rewards.

    ``-log sigmoid(beta*h_w - shift) - log sigmoid(-(beta*h_l - shift))``.

    BCO (Jung et al. 2024, arXiv:2404.04656, equation 10). ``reward_shift`` is the paper's running
    mean of the rewards, without gradient; TRL 1.x leaves it out (0).
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return -logsigmoid(beta * h_w - reward_shift) - logsigmoid(reward_shift - beta * h_l)


def sppo_hard(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
) -> Tensor:
    """``(h_w - 1 / (2 * beta))**2 + (h_l + 1 / (2 * beta))**2``: SPPO with certain wins.

    Wu et al. 2024 (arXiv:2405.00675, equation 4.7), the probability of winning being 1 and 0.
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    target = 0.5 / beta
    return (h_w - target).square() + (h_l + target).square()


def aot(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """DPO's logistic on sorted gaps, the policy's against the reference's, quantile by quantile.

    A gap is ``logp_w - logp_l``.

    AOT paired (Melnyk et al. 2024, arXiv:2406.05882, section 3): the policy's distribution of gaps
    is to dominate the reference's. Row i of the result is the i-th smallest, not example i. The
    sort runs over the batch given, so this loss alone (with :func:`aot_unpaired`) is defined on a
    whole batch and changes when one is split.
    """
    policy_w, policy_l = _gaps(chosen_logps, rejected_logps, None, None)
    if ref_chosen_logps is None or ref_rejected_logps is None:
        reference = torch.zeros_like(policy_w)
    else:
        ref_w, ref_l = _gaps(ref_chosen_logps, ref_rejected_logps, None, None)
        reference = ref_w - ref_l
    d = (policy_w - policy_l).sort().values - reference.sort().values
    return smoothed_logistic(beta * d, label_smoothing)


def aot_unpaired(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """As :func:`aot`, sorting ``h_w`` against ``h_l``: the two need not share a prompt."""
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return smoothed_logistic(beta * (h_w.sort().values - h_l.sort().values), label_smoothing)


def apo_zero(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
) -> Tensor:
    """``1 - sigmoid(beta * h_w) + sigmoid(beta * h_l)``: chosen up, rejected down.

    APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7), for answers better than the
    model's own.
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return torch.sigmoid(-beta * h_w) + torch.sigmoid(beta * h_l)


def apo_down(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
) -> Tensor:
    """``sigmoid(beta * h_w) + 1 - sigmoid(beta * d)``: both down, the rejected one further.

    APO-down (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8), for answers worse than the
    model's own.
    """
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return torch.sigmoid(beta * h_w) + torch.sigmoid(-beta * (h_w - h_l))


def discopop(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float = 0.1,
    tau: float = 0.05,
) -> Tensor:
    """The log-ratio modulated loss, found by search.

    ``(1 - m) * -log sigmoid(z) + m * exp(-z)``, ``z = beta * d``, ``m = sigmoid(z / tau)``.

    DiscoPOP (Lu et al. 2024, arXiv:2406.08414, equation 5). The second term is computed as
    ``exp(log sigmoid(z / tau) - z)``: a product of 0 and inf at very negative z otherwise.
    """
    if not 0 < tau <= 1:
        raise ValueError(f"tau is {tau}: pass one above 0 and at most 1")
    h_w, h_l = _gaps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    z = beta * (h_w - h_l)
    return torch.sigmoid(-z / tau) * -logsigmoid(z) + bounded_exp(logsigmoid(z / tau) - z)


def _gaps(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor | None, ref_rejected: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return policy minus reference for chosen and rejected rows."""
    chosen, rejected, ref_chosen, ref_rejected = finite_rows(
        chosen_logps=chosen,
        rejected_logps=rejected,
        ref_chosen_logps=ref_chosen,
        ref_rejected_logps=ref_rejected,
    )
    return chosen - ref_chosen, rejected - ref_rejected


def _batch_kl(gap: Tensor) -> Tensor:
    return gap.detach().sum().div(max(gap.numel(), 1)).clamp(min=0)
