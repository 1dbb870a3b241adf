"""What every backend's tuner shares: a child process that proves and times candidates, and the decision."""
