"""The part of tuning that all backends share: a child process that checks and times candidates, and the decision."""
