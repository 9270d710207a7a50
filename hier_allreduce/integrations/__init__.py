"""The all-reduce as other frameworks select it. Each module imports its framework; nobody imports them."""
