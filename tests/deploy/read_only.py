"""A root file system as a container with `readOnlyRootFilesystem` has it: nothing can be written but what is below /tmp."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from tests.deploy.platforms import ROOT

# $1: a folder for the new root; $2: size of /tmp; then pairs of a path here and its place there; then --, and the command.
# Everything is bound read-only into a new root in a mount namespace of its own, which is gone with the process.
_SCRIPT = r"""
set -e
new=$1 size=$2
shift 2
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$new"
mkdir "$new/etc"
for file in group hosts ld.so.cache localtime nsswitch.conf passwd; do
  if [ -e "/etc/$file" ]; then cp -L "/etc/$file" "$new/etc/"; fi
done
mkdir -p "$new/tmp" "$new/proc" "$new/dev" "$new/app"
mount -t tmpfs -o "mode=1777,size=$size" tmpfs "$new/tmp"
while [ "$1" != -- ]; do
  mkdir -p "$new$2"
  mount --bind "$1" "$new$2"
  mount -o remount,bind,ro "$new$2"
  shift 2
done
shift
mount -t proc proc "$new/proc"
mount --rbind /dev "$new/dev"
mount -o remount,ro "$new"
exec chroot "$new" setpriv --reuid 1000 --regid 1000 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
  sh -c 'cd /app && exec "$@"' sh "$@"
"""


def lacking() -> str:
    """Why there can be no such root here, empty if there can."""
    if os.geteuid() != 0:
        return "root's rights"
    missing = [name for name in ("unshare", "setpriv", "chroot") if shutil.which(name) is None]
    if missing:
        return missing[0]
    done = subprocess.run(["unshare", "-m", "mount", "--make-rprivate", "/"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "a mount namespace"


def read_only(new: Path, size: str, places: Mapping[str, Path], *, checkout: bool = True) -> list[str]:
    """The command that runs another one as uid 1000 in a read-only root. `places` are its paths with the folders that they
    show. The system's programs, Python and, with `checkout`, this checkout keep their paths."""
    python = {sys.base_prefix, sys.prefix, *site.getsitepackages(), *sysconfig.get_paths().values(), str(ROOT)}
    added = {path for path in sys.path if path and Path(path).is_dir()}
    if not checkout:
        python, added = ({path for path in paths if Path(path) != ROOT} for paths in (python, added))
    system = [path for path in ("/usr", "/bin", "/lib", "/lib64") if Path(path).exists()]
    binds: list[str] = []
    there: list[Path] = []
    for path in [*system, *sorted(python | added, key=len)]:
        if Path(path).is_dir() and not any(Path(path).is_relative_to(parent) for parent in there):
            there.append(Path(path))
            binds += [path, path]
    for place, path in places.items():
        binds += [str(path), place]
    return ["unshare", "-m", "sh", "-c", _SCRIPT, "sh", str(new), size, *binds, "--"]
