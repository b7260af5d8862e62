#!/usr/bin/env bash
# Make the base image of deploy/Dockerfile on a machine that cannot pull one.
#
#   sudo deploy/local-base.sh
#   docker build --build-arg BASE=pagerelay-base:local -f deploy/Dockerfile .
#
# The image is a minimal Debian with python3 and venv, made by debootstrap. It
# also gets what this machine's pip needs to reach its packages: the CA bundle,
# and pip's index, find-links and constraint settings (from pip's own files and
# from PIP_* variables), so that no such setting has to stand in the Dockerfile.
#
# Environment:
#   BASE_IMAGE       name of the image             (pagerelay-base:local)
#   DEBIAN_SUITE     suite to install              (bookworm: Python 3.11)
#   DEBIAN_MIRROR    where debootstrap fetches     (http://deb.debian.org/debian)
#   EXTRA_PACKAGES   more packages, comma separated
#   MAX_LOCAL_MIB    a folder that pip finds packages in is copied into the image
#                    up to this size; a larger one is left out       (1024)
#   http_proxy, https_proxy, no_proxy   are honoured by debootstrap as usual
set -euo pipefail

image=${BASE_IMAGE:-pagerelay-base:local}
suite=${DEBIAN_SUITE:-bookworm}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
packages=ca-certificates,python3,python3-venv${EXTRA_PACKAGES:+,$EXTRA_PACKAGES}

die() { echo "local-base: $*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || die "debootstrap needs root"
command -v debootstrap >/dev/null || die "debootstrap is not installed"
command -v docker >/dev/null || die "docker is not installed"
docker info >/dev/null 2>&1 || die "no docker engine answers"

root=$(mktemp -d "${TMPDIR:-/tmp}/pagerelay-base.XXXXXX")
cleanup() {
    # debootstrap may have left /proc or /sys mounted if it was interrupted.
    umount "$root/proc" "$root/sys" 2>/dev/null || true
    rm -rf --one-file-system "$root"
}
trap cleanup EXIT

log=$root.log
echo "local-base: debootstrap $suite from $mirror"
debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$mirror" \
    >"$log" 2>&1 || { tail -n 20 "$log" >&2; die "debootstrap failed, see $log"; }
rm -f "$log"

# Certificates: this machine's bundle, which may hold a CA of its own network.
bundle=/etc/ssl/certs/ca-certificates.crt
if [ -s "$bundle" ]; then
    install -D -m 0644 "$bundle" "$root$bundle"
fi

# pip: one /etc/pip.conf that says what pip on this machine would do.
ROOT=$root BUNDLE=$bundle MAX_MIB=${MAX_LOCAL_MIB:-1024} python3 - <<'PY'
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

root = os.environ["ROOT"]
max_bytes = int(os.environ["MAX_MIB"]) * 2**20

listing = subprocess.run(
    [sys.executable, "-m", "pip", "config", "list"],
    capture_output=True, text=True, check=True,
).stdout
settings = {}  # name -> list of words; environment variables add to the files
for line in listing.splitlines():
    key, _, value = line.partition("=")
    section, _, name = key.rpartition(".")
    name = name.strip(".").lower().replace("_", "-")
    if section.strip(":.") not in ("global", "env", "install"):
        continue
    words = shlex.split(value)[0].split() if value.strip("'\"") else []
    settings.setdefault(name, [])
    settings[name] += [word for word in words if word not in settings[name]]


def local(word):
    """The path of a local file or folder that the setting names, else None."""
    if word.startswith("file://"):
        return Path(unquote(urlparse(word).path))
    return Path(word) if word.startswith("/") else None


def copy(path):
    """Copy path to the same place in the image; False if it cannot be."""
    if not path.exists():
        return False
    if path.is_file():
        target = Path(root + str(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        return True
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    # The pages of a local index point to files beside it, so an index is
    # weighed, and copied, with its parent folder.
    if size > max_bytes:
        print(f"local-base: left out {path}: {size >> 20} MiB", file=sys.stderr)
        return False
    shutil.copytree(path, root + str(path), dirs_exist_ok=True)
    return True


lines = ["[global]"]
for name in ("index-url", "extra-index-url", "find-links", "constraint",
             "trusted-host", "timeout", "default-timeout", "retries", "proxy"):
    kept = []
    for word in settings.get(name, []):
        path = local(word)
        if name.endswith("index-url") and path is not None:
            path = None if not copy(path.parent) else path
            if path is None:
                continue
        elif path is not None and not copy(path):
            continue
        kept.append(word)
    if kept:
        lines.append(f"{name.replace('default-', '')} = " + "\n    ".join(kept))
lines.append("disable-pip-version-check = true")
if os.path.exists(root + os.environ["BUNDLE"]):
    lines.append(f"cert = {os.environ['BUNDLE']}")
Path(root, "etc/pip.conf").write_text("\n".join(lines) + "\n")
print("local-base: pip.conf of the image:", *lines, sep="\n    ")
PY

rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* \
    "$root"/usr/share/doc/* "$root"/usr/share/locale/* "$root"/usr/share/man/*
tar -C "$root" --numeric-owner -c . | docker import \
    --change "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    --change "ENV LANG=C.UTF-8" \
    --change "ENV SSL_CERT_FILE=$bundle" \
    --change "CMD [\"python3\"]" \
    - "$image" >/dev/null
echo "local-base: made $image"
