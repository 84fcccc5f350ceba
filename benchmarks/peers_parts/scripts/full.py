"""Full prefill: nothing is kept."""

from answer import answer, read_job

if __name__ == "__main__":
    answer(read_job(), enable_prefix_caching=False)
