"""``python -m testing.kube.openapi``: print the OpenAPI v2 document of the API server as JSON."""

from __future__ import annotations

import json
import sys

from testing.kube.cluster import Cluster

if __name__ == "__main__":
    with Cluster(num_nodes=0) as plane:
        json.dump(plane.api.request("GET", "/openapi/v2"), sys.stdout)
