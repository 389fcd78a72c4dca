# Sourced by the scripts beside it: unpacks Debian programs under .tools, without root and without installing them.

# Downloads Debian packages and unpacks them into one folder.
#
#     unpack_debian_packages TARGET PACKAGE...
#
# On failure it returns non-zero and prints the reason to stderr.
unpack_debian_packages() {
  local target=$1 scratch
  shift
  if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "this is no Debian, which has $*" >&2
    return 1
  fi
  scratch=$(mktemp -d)
  mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
  local options=(-qq -o "Dir::State::lists=$scratch/lists" -o "Dir::Cache=$scratch/cache" -o APT::Sandbox::User=root)
  if (cd "$scratch" && timeout 180 apt-get "${options[@]}" update && timeout 180 apt-get "${options[@]}" download "$@") \
    >"$scratch/log" 2>&1; then
    mkdir -p "$target"
    for package in "$scratch"/*.deb; do dpkg-deb --extract "$package" "$target"; done
    rm -rf "$scratch"
  else
    tail -n 1 "$scratch/log" >&2
    rm -rf "$scratch"
    return 1
  fi
}
