"""An API server in front of the real one, which delays or refuses requests as on a bad day."""

import contextlib
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from testing.kube.cluster import Cluster
from tests.harness.commands.json_server import JsonHandler, serving

Fault = Callable[[str], tuple[float, int]]
"""Returns for a path the seconds of delay, and the status of a refusal; 0: no refusal."""


class _FaultyApi(JsonHandler):
    plane: Cluster
    fault: list[Fault]
    is_over: threading.Event

    def _pass_on(self) -> None:
        seconds, status = self.fault[0](self.path)
        if self.is_over.wait(seconds):  # real time: the client gives up meanwhile
            return
        with contextlib.suppress(ConnectionError):
            if status:
                self.answer({"kind": "Status", "message": "not today", "reason": "Bad"}, status)
                return
            body = self.rfile.read(int(self.headers["Content-Length"] or 0)) or None
            headers = {**self.headers, "Accept-Encoding": "identity"}
            url = self.plane.url + self.path
            request = urllib.request.Request(url, body, headers, method=self.command)
            context = ssl.create_default_context(cafile=str(self.plane.ca))
            try:
                answer = urllib.request.urlopen(request, timeout=60, context=context)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                content = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST = _pass_on


@contextlib.contextmanager
def faulty_api(plane: Cluster, fault: Fault, folder: Path) -> Iterator[Path]:
    """Serve the API with this fault. Returns the administrator's kubeconfig for it."""
    is_over = threading.Event()
    with serving(_FaultyApi, plane=plane, fault=[fault], is_over=is_over) as server:
        config = json.loads(plane.kubeconfig().read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{server.server_port}"}
        file = folder / "faulty.kubeconfig"
        file.write_text(json.dumps(config))
        yield file
        is_over.set()
