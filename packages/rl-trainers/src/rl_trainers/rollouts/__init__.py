"""Generating completions: what is asked of an engine, and the engines."""

from rl_trainers.rollouts.engine import Rollout, RolloutEngine, SamplingParams
from rl_trainers.rollouts.in_process import InProcessEngine

__all__ = ["InProcessEngine", "Rollout", "RolloutEngine", "SamplingParams"]
