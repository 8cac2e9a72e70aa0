"""Write the generated files, or with ``--check`` list those that are out of date."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from lmcache_operator.api.crd import render
from tools import api_docs, dashboards, metrics_docs, resource_docs, stats_docs
from tools.kube import schemas
from tools.pictures import drawing
from tools.provenance import licences

ROOT = Path(__file__).resolve().parent.parent
CHART_FILES = ROOT / "charts" / "lmcache-operator" / "files"
CRDS = (ROOT / "crds", CHART_FILES / "crds")
API = ROOT / "docs" / "reference" / "api.md"
RESOURCE = ROOT / "docs" / "reference" / "resource.md"
LICENCES = ROOT / "docs" / "reference" / "licences.md"
METRICS = ROOT / "docs" / "reference" / "metrics.md"
STATS = ROOT / "docs" / "reference" / "stats.md"
PICTURES = ROOT / "docs" / "pictures"
PROTO_CODE = [
    ROOT / f"{name}_pb2.{suffix}"
    for name in ("sidecar/lmcache_client/rpc/kvcache", "testing/dra/kubelet")
    for suffix in ("py", "pyi")
]


def generated() -> dict[Path, str]:
    """Return the path and the text of each generated file."""
    rendered = render(schemas.definitions()).items()
    crds = {folder / f"{name}.yaml": text for folder in CRDS for name, text in rendered}
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([ROOT / "tools" / "generate_proto.sh", out], check=True)
        code = {path: (Path(out) / path.relative_to(ROOT)).read_text() for path in PROTO_CODE}
    docs = {API: api_docs.render(), RESOURCE: resource_docs.render()}
    docs |= {METRICS: metrics_docs.render(), STATS: stats_docs.render(), LICENCES: licences.render()}
    boards = {CHART_FILES / "dashboards" / name: text for name, text in dashboards.render().items()}
    pictures = {PICTURES / name: text for name, text in drawing.render().items()}
    return {**crds, **docs, **code, **boards, **pictures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    texts = generated()
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run `make generate`", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path])
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
