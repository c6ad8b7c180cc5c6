"""An S3 server on a free port of this machine, as a process of its own: prints the port, then serves."""

from __future__ import annotations

import sys

from moto.moto_server.threaded_moto_server import ThreadedMotoServer


def main() -> None:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()  # ends with the process that started this one, however that ends


if __name__ == "__main__":
    main()
