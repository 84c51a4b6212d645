"""Losses as pure functions: log-probs in, unreduced losses out.

Token-level losses return ``[B, T]`` and are exactly 0, in value and gradient, where the mask is 0;
sequence-level ones return ``[B]``. :mod:`rl_ops.losses.reduce` averages them.
"""

from rl_ops.losses.diagnostics import PolicyDiagnostics, policy_diagnostics
from rl_ops.losses.divergence import f_divergence_score
from rl_ops.losses.kto import apo_zero_unpaired, kto, kto_kl
from rl_ops.losses.policy import (
    bnpo,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    ppo,
    reinforce_pp,
    reinforce_pp_baseline,
    sapo,
)
from rl_ops.losses.preference import (
    aot,
    aot_unpaired,
    apo_down,
    apo_zero,
    bco_pair,
    discopop,
    exo_pair,
    hinge,
    ipo,
    kto_pair,
    nca_pair,
    robust,
    sigmoid,
    sigmoid_norm,
    sppo_hard,
)
from rl_ops.losses.reduce import loss_denominator, reduce_loss, sequence_logps
from rl_ops.losses.reference_free import cpo, orpo, simpo
from rl_ops.losses.reward import bradley_terry
from rl_ops.losses.sequence_policy import gspo, luspo, rloo, vespo
from rl_ops.losses.sft import dft, nll
from rl_ops.losses.value import clipped_value

__all__ = [
    "PolicyDiagnostics",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "apo_zero_unpaired",
    "bco_pair",
    "bnpo",
    "bradley_terry",
    "cispo",
    "clipped_value",
    "cpo",
    "dapo",
    "dft",
    "discopop",
    "dr_grpo",
    "exo_pair",
    "f_divergence_score",
    "grpo",
    "gspo",
    "hinge",
    "ipo",
    "kto",
    "kto_kl",
    "kto_pair",
    "loss_denominator",
    "luspo",
    "nca_pair",
    "nll",
    "orpo",
    "policy_diagnostics",
    "ppo",
    "reduce_loss",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "robust",
    "sapo",
    "sequence_logps",
    "sigmoid",
    "sigmoid_norm",
    "simpo",
    "sppo_hard",
    "vespo",
]
