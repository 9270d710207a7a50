"""A wind tunnel for plans: TensorFlow's executor runs them over emulated links, in emulated time. See README.md."""
