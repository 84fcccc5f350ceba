"""LMCache's server with its blend engine, and its client in vLLM."""

import socket
import subprocess
import sys
import time
from pathlib import Path

from answer import answer, read_job

BLOCK_TOKENS = 128
"""The server's chunks must be whole blocks."""
START_TIMEOUT_S = 120.0
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def server_command(port: int) -> list[str]:
    # With the default transfer mode the client asks for one that the server has not, and waits for ever.
    options = {
        "--engine-type": "blend",
        "--host": HOST,
        "--port": port,
        "--http-host": HOST,
        "--http-port": free_port(),
        "--chunk-size": BLOCK_TOKENS,
        "--l1-size-gb": 1,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
    }
    program = str(Path(sys.executable).with_name("lmcache"))
    return [program, "server", *(str(word) for pair in options.items() for word in pair), "--disable-metrics"]


def wait_until_open(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise SystemExit(f"the LMCache server ended with {server.returncode} as it started")
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit(f"the LMCache server does not listen after {START_TIMEOUT_S:.0f} s")


if __name__ == "__main__":
    port = free_port()
    server = subprocess.Popen(server_command(port))
    try:
        wait_until_open(port, server)
        answer(
            read_job(),
            {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": port},
            },
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=False,
            disable_hybrid_kv_cache_manager=True,
        )
    finally:
        server.terminate()
        server.wait()
