"""What cachecraft-rag does, on real passages and questions: run it by `make demo`.

Real questions are asked through LlamaIndex, each with reuse and by full compute; then some through
LangChain over the same index; then a document changes. Takes some minutes on two cores. The exit
code is 1 if too little was reused, or if KV of a changed document was.
"""

from __future__ import annotations

import os
import sys
import warnings

# Read by libraries when they are imported, here and in vLLM's processes: faults only, no bars.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> int:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")
    # Not above: vLLM's processes import this file again, and they need none of it.
    from demo_parts.story import tell

    return tell()


# Needed: without it vLLM's processes would start the demo again.
if __name__ == "__main__":
    sys.exit(main())
