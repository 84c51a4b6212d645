"""What every trainer shares: the base trainer and config, metrics, the run folder."""
