# Sourced by the scripts beside it: unpacks Debian programs under .tools, without root and without installing them.

# Downloads Debian packages and unpacks them into one folder.
#
#     unpack_debian_packages [--with-dependencies] TARGET PACKAGE...
#
# With dependencies, those that this machine lacks are unpacked, too. UNDERSTUDY_DPKG_STATUS may name another list of what
# is installed. On failure it returns non-zero and prints the reason to stderr.
unpack_debian_packages() {
  local how=(download) target scratch
  if [ "$1" = --with-dependencies ]; then
    how=(install --download-only --no-install-recommends --assume-yes)
    shift
  fi
  target=$1
  shift
  if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "this is no Debian, which has $*" >&2
    return 1
  fi
  scratch=$(mktemp -d)
  mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
  local options=(-qq -o "Dir::State::lists=$scratch/lists" -o "Dir::Cache=$scratch/cache" -o APT::Sandbox::User=root
    -o Debug::NoLocking=true)
  if [ -n "${UNDERSTUDY_DPKG_STATUS:-}" ]; then options+=(-o "Dir::State::status=$UNDERSTUDY_DPKG_STATUS"); fi
  if (cd "$scratch" && timeout 180 apt-get "${options[@]}" update &&
    timeout 280 apt-get "${options[@]}" "${how[@]}" "$@") >"$scratch/log" 2>&1; then
    mkdir -p "$target"
    for package in "$scratch"/*.deb "$scratch"/cache/archives/*.deb; do
      if [ -e "$package" ]; then dpkg-deb --extract "$package" "$target"; fi
    done
    rm -rf "$scratch"
  else
    tail -n 1 "$scratch/log" >&2
    rm -rf "$scratch"
    return 1
  fi
}
