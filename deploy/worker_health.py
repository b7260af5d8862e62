"""Exit 0 if a router counts the worker of this container among its live ones. Cheap: standard library only.

A worker has no HTTP of its own; what matters of it is that it answers the router's protocol, engine and all.
"""

import json
import os
import socket
import sys
import urllib.request
from urllib.parse import urlsplit

HTTP_PORT = os.environ.get("PAGERELAY_ROUTER_PORT", "8000")


def main() -> int:
    routers = os.environ.get("PAGERELAY_WORKER_ROUTERS", "tcp://router:5555").split(",")
    reasons = []
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy
    for router in routers:
        url = f"http://{urlsplit(router.strip()).hostname}:{HTTP_PORT}/cluster"
        try:
            with direct.open(url, timeout=3) as answer:
                workers = json.load(answer)["workers"]
        except (OSError, ValueError, KeyError) as error:
            reasons.append(f"{url}: {error}")
            continue
        mine = [worker["state"] for worker in workers if worker["host"] == socket.gethostname()]
        if any(state in ("ready", "draining") for state in mine):
            return 0
        reasons.append(f"{url}: this worker is {mine[0] if mine else 'not there'}")
    print("; ".join(reasons))
    return 1


if __name__ == "__main__":
    sys.exit(main())
