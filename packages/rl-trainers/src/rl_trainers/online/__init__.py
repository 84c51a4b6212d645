"""The one rollout loop: plan of prompts, groups, rewards, buffer, and the trainer around them."""
