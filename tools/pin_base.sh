#!/usr/bin/env bash
# Pins the base of the image to the digest that its tag has now, for all platforms, in `ARG BASE=` of the Dockerfile.
#
#     tools/pin_base.sh [IMAGE:TAG] [DOCKERFILE]    # the tag that is there by default
set -euo pipefail
file=${2:-$(dirname "$0")/../Dockerfile}
base=$(sed -n 's/^ARG BASE=\([^@]*\).*/\1/p' "$file")
image=${1:-$base}
digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
[[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "docker gave no digest of $image, but: $digest" >&2; exit 1; }
sed -i "s|^ARG BASE=.*|ARG BASE=$image@$digest|" "$file"
grep '^ARG BASE=' "$file"
