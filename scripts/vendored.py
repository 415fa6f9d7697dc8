"""Compares the vendored files of the console with their npm packages: `python scripts/vendored.py`.

`--write` puts the packages' files in their place. A list names the files, with the SHA-256 of each.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path

LIST = Path(__file__).resolve().parent.parent / "gateway" / "operator" / "console" / "vendor" / "vendored.json"
REGISTRY = "https://registry.npmjs.org"
_LARGEST = 16 * 1024 * 1024  # bytes of a package


def packed(package: str, version: str) -> tarfile.TarFile:
    """A package, as the registry has it."""
    url = f"{REGISTRY}/{package}/-/{package}-{version}.tgz"
    with urllib.request.urlopen(url, timeout=60) as answer:
        body = answer.read(_LARGEST + 1)
    if len(body) > _LARGEST:
        raise ValueError(f"{url} is larger than {_LARGEST} bytes")
    return tarfile.open(fileobj=io.BytesIO(body), mode="r:gz")


def fetched(package: str, version: str, members: Iterable[str]) -> dict[str, bytes]:
    """These files of a package, as the registry has it."""
    found = {}
    with packed(package, version) as archive:
        for member in members:
            file = archive.extractfile(f"package/{member}")
            if file is None:
                raise ValueError(f"{package} {version} has no file {member}")
            found[member] = file.read()
    return found


def main(arguments: list[str]) -> int:
    """0 if every file is its package's; with --write it is afterwards."""
    wrong = 0
    for entry in json.loads(LIST.read_text(encoding="utf-8")):
        member, place = entry["member"], LIST.parent / entry["file"]
        body = fetched(entry["package"], entry["version"], [member])[member]
        digest = hashlib.sha256(body).hexdigest()
        if digest != entry["sha256"]:
            print(f"{entry['file']}: the package has {digest}, the list {entry['sha256']}")
            wrong += 1
        elif "--write" in arguments:
            place.write_bytes(body)
        elif place.read_bytes() != body:
            print(f"{entry['file']}: not the file of {entry['package']} {entry['version']}")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
