"""Rewards: running the user's functions so that one failing call harms nothing else."""

from rl_trainers.rewards.runner import RewardRunner, ScoredRewards, load_reward_function

__all__ = ["RewardRunner", "ScoredRewards", "load_reward_function"]
