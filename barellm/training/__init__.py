"""The loop and what it leaves behind: schedules, checkpoints, metrics, curves."""
