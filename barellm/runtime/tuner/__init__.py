"""The autotuner that both backends share: problems, the child process that measures, the decision, the database."""
