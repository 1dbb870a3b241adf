"""What a step costs, before it runs and after: plans, rooflines, counted work of the process, kernels' machine code."""
