"""Exact log-probabilities, losses and advantages for post-training language models.

Needs torch, nothing else.
"""

from rl_ops import losses
from rl_ops._version import __version__
from rl_ops.advantages import (
    GroupCounts,
    ReturnsAndAdvantages,
    generalized_advantages,
    group_advantages,
    group_counts,
    leave_one_out_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
)
from rl_ops.fused_linear import linear_selective_log_softmax
from rl_ops.kl import kl_estimate
from rl_ops.logprobs import (
    LogpsAndEntropy,
    entropy_from_logits,
    logps_and_entropy,
    selective_log_softmax,
)
from rl_ops.masked import masked_mean, masked_var, masked_whiten, require_finite, zero_masked
from rl_ops.padding import flush_left, flush_right, pad, pad_to_length

__all__ = [
    "GroupCounts",
    "LogpsAndEntropy",
    "ReturnsAndAdvantages",
    "__version__",
    "entropy_from_logits",
    "flush_left",
    "flush_right",
    "generalized_advantages",
    "group_advantages",
    "group_counts",
    "kl_estimate",
    "leave_one_out_advantages",
    "linear_selective_log_softmax",
    "logps_and_entropy",
    "losses",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "pad",
    "pad_to_length",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "require_finite",
    "selective_log_softmax",
    "zero_masked",
]
