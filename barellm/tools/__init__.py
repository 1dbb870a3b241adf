"""What looks at plans, kernels and steps: plan, inspect, profile, bench."""
