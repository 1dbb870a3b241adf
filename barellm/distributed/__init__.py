"""Several processes as the ranks of one run: how they start, talk, and notice that one of them is gone."""
