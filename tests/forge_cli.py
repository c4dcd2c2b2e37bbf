#!/usr/bin/env python3
"""Stands in for a forge's CLI in test images.

`<cli> api PATH [-X METHOD] [-f KEY=TEXT] [-F KEY=JSON]`. Installed under the names
of the CLIs that an image lacks. Like them it finds the token in the forge's own
variable; the host is that of `origin`. Prints the answer; exits 1 on an error of the
API. Standard library only.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit


def _basic(token: str) -> str:
    return "Basic " + base64.b64encode(f":{token}".encode()).decode()


#: By name: the variables that may hold the token, the header, the API's root.
CLIS = {
    "gh": (("GH_ENTERPRISE_TOKEN", "GH_TOKEN"), "Bearer {}".format, "/api/v3/"),
    "glab": (("GITLAB_TOKEN",), "Bearer {}".format, "/api/v4/"),
    "tea": (("GITEA_SERVER_TOKEN", "GITEA_TOKEN"), "token {}".format, "/api/v1/"),
    "az": (("AZURE_DEVOPS_EXT_PAT",), _basic, "/"),
}


def main() -> int:
    if sys.argv[1:] == ["--version"]:
        print("stand-in 1")
        return 0
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["api"])
    parser.add_argument("path")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-f", dest="fields", action="append", default=[])
    parser.add_argument("-F", dest="typed", action="append", default=[])
    given = parser.parse_args()
    variables, header, root = CLIS[Path(sys.argv[0]).name]
    token = next(os.environ[name] for name in variables if name in os.environ)
    origin = subprocess.check_output(["git", "remote", "get-url", "origin"], text=True)
    where = urlsplit(origin.strip())
    fields: dict[str, object] = dict(f.split("=", 1) for f in given.fields)
    for name, value in (field.split("=", 1) for field in given.typed):
        fields[name] = json.loads(value)
    request = urllib.request.Request(
        f"{where.scheme}://{where.netloc}{root}{given.path}",
        json.dumps(fields).encode() if fields else None,
        {"Authorization": header(token), "Content-Type": "application/json"},
        method=given.method or ("POST" if fields else "GET"),
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            print(answer.read().decode())
    except urllib.error.HTTPError as error:
        print(f"HTTP {error.code}: {error.read().decode()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
