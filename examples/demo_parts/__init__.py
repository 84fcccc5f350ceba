"""The parts of `examples/demo.py`: what it reads, asks, counts and prints."""
