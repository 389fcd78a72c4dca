#!/usr/bin/env bash
# Unpacks Debian's Chromium, without a window, under .tools/chromium, without root and without installing it, for the tests of
# the page in a browser and for its pictures in the docs. On failure it prints the reason and exits with 1.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/debian_packages.sh
target=.tools/chromium
[ -x "$target/chromium" ] && exit 0
if command -v chromium >/dev/null; then exit 0; fi
rm -rf "$target"
unpack_debian_packages --with-dependencies "$target" chromium-headless-shell fonts-dejavu-core fontconfig-config \
  libatomic1 # of the program that drives the browser
program=$target/usr/lib/chromium/chromium-headless-shell
[ -x "$program" ] || { echo "Debian's chromium-headless-shell has no $program" >&2; exit 1; }
cat >"$target/fonts.conf" <<CONF
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <dir>$PWD/$target/usr/share/fonts</dir>
  <cachedir>$PWD/$target/cache</cachedir>
</fontconfig>
CONF
libraries=$(find "$PWD/$target" -name '*.so*' -not -path '*/lib/chromium*/*' -printf '%h\n' | sort -u | paste -sd:)
cat >"$target/chromium" <<RUN
#!/bin/sh
LD_LIBRARY_PATH="$libraries" FONTCONFIG_FILE="$PWD/$target/fonts.conf" exec "$PWD/$program" "\$@"
RUN
chmod +x "$target/chromium"
