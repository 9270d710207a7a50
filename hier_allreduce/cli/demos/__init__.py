"""Training jobs that show the all-reduce at work on real data."""
