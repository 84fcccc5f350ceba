"""The parts of `benchmarks.peers`: who is compared, how each is run, what is shown."""
