"""Goodput under overload: answers per second to 400 clients that ignore Retry-After, and to 16.

    python -m tests.attack.goodput [--rounds 3] [--seconds 7]

The server's processes are pinned to one core and the clients to another, so that clients cost the
server nothing; how much of its core each used is printed. On a machine with other work, begin with
`nice -n -20`. The figures are in docs/security.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.attack.served import convolution, processes
from tests.support.overload import Overload, Overloading

CLIENTS = (16, 400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=7.0)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("needs two cores, one for the server and one for the clients")
    found: dict[tuple[bool, int], list[Overload]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, {cores[0]})
        with processes(Path(folder), max_inflight_bytes="512MiB") as server:
            os.sched_setaffinity(0, {cores[1]})
            request = convolution()
            for _ in range(given.rounds):
                for keep in (True, False):
                    for count in CLIENTS:
                        clients = Overloading(server.address, request, count, keep=keep)
                        found[keep, count].append(clients.run(given.seconds, server.cpu_s))
    for keep in (True, False):
        rates = {
            count: statistics.median(one.answered / one.took_s for one in found[keep, count])
            for count in CLIENTS
        }
        for count in CLIENTS:
            rounds = found[keep, count]
            refused = statistics.median(one.refused / one.took_s for one in rounds)
            server_share = statistics.median(one.computed_s / one.took_s for one in rounds)
            clients_share = statistics.median(one.clients_s / one.took_s for one in rounds)
            print(
                f"{'kept connections' if keep else 'reconnecting':16} {count:3} clients: "
                f"{rates[count]:.0f} answers, {refused:.0f} refusals a second, "
                f"{rates[count] / rates[CLIENTS[0]]:.2f} of {CLIENTS[0]} clients'; cores used: "
                f"server {server_share:.2f}, clients {clients_share:.2f}"
            )


if __name__ == "__main__":
    main()
